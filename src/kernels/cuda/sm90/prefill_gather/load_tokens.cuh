// SPDX-License-Identifier: Apache-2.0
// Producer warps for pages of one token. One warp takes row tiles and copies the page table's
// entries of their key tiles; three copy the rows of K and V: a row's address is one multiply-add.
#pragma once

#include "kernels/cuda/sm90/prefill_gather/load_rows.cuh"

namespace fovea::kernels::cuda {

// Takes row tiles and copies page ids, up to kTokenSlots key tiles before the rows. Warp 1 runs it.
template <class Config>
__device__ void take_token_tiles(const PrefillParams& params,
                                 typename Config::SharedMemory& shared) {
  const int lane = threadIdx.x % 32;
  const KeyParams& keys = params.attention.keys;
  auto& tokens = shared.tokens;
  TileTaker<Config> taker{params, shared};
  Ring<Config::kQueryStages> q;
  Ring<kTokenSlots> at;
  while (true) {
    const WorkTile& tile = taker.take();
    if (tile.request < 0) break;
    taker.claim_next();
    load_queries_boxes<Config>(params, shared, tile, q);
    const int32_t* const pages = keys.page_table + tile.request * keys.page_table_stride;
    const char* const k = static_cast<const char*>(keys.k) + tile.kv_head * keys.k_head_stride * 2;
    const char* const v = static_cast<const char*>(keys.v) + tile.kv_head * keys.v_head_stride * 2;
    const Interval live = {tile.key_begin, tile.kv_len};
    const int block_begin = tile.block_begin;
#pragma unroll 1
    for (int block = tile.block_end - 1; block >= block_begin; --block) {
      tokens.empty[at.stage].wait(at.phase ^ 1);
      if (lane == 0) {
        const int key = block * Config::kKeys;
        tokens.tiles[at.stage] = {k, v, {live.begin - key, live.end - key}};
        // Entries after the request's keys are not used. The rows of the table are multiples of 256
        // entries.
        const int entries = min(Config::kKeys, static_cast<int>(keys.page_table_stride) - key);
        const int bytes = entries * static_cast<int>(sizeof(int32_t));
        tokens.full[at.stage].arrive_expecting(bytes);
        load_bytes(tokens.pages[at.stage], pages + key, bytes, tokens.full[at.stage], kEvictNormal);
      }
      __syncwarp();
      at.advance();
    }
  }
  tokens.empty[at.stage].wait(at.phase ^ 1);
  if (lane == 0) {
    tokens.tiles[at.stage].k = nullptr;
    tokens.full[at.stage].arrive();
  }
  taker.finish();
}

// The rows of a key tile of K or V that a warp copies: every third group of 16 rows. Groups of V
// begin with another warp than those of K, so that each warp has 5 or 6 of 16 groups. 8 lanes copy
// four neighbouring rows, 16 bytes of each 128 a lane.
template <class Config, bool kOfKeys>
struct TokenGroups {
  static constexpr int kRows = 16;
  static constexpr int kPitch = kLoaderWarps * kRows;
  static constexpr int kAll = Config::kKeys / kRows;
  static constexpr int kOwn = (kAll + kLoaderWarps - 1) / kLoaderWarps;  // maximum number of groups
  int first;                                                             // first group
  int first_row;                                                         // first row of the lane

  __device__ __forceinline__ TokenGroups()
      : first((loader_thread() / 32u + (kOfKeys ? 0 : 1)) % kLoaderWarps),
        first_row(first * kRows + threadIdx.x % 32 / 8 * 4) {}
  __device__ __forceinline__ bool has(int group) const {
    return (group + 1) * kLoaderWarps <= kAll || first + group * kLoaderWarps < kAll;
  }
};

// Copies the rows of a key tile whose keys and columns are all live. `first` is the place of the
// lane's first row, row_0 its part of the row in page 0.
template <class Config, bool kOfKeys>
__device__ __forceinline__ void copy_whole_tokens(
    const TokenGroups<Config, kOfKeys>& groups,
    const int4 (&pages)[TokenGroups<Config, kOfKeys>::kOwn], const char* row_0, uint32_t stride,
    uint32_t first) {
  using Groups = TokenGroups<Config, kOfKeys>;
  constexpr int kColumnBlocks = (kOfKeys ? Config::kHeadDim : Config::kHeadDimV) / kSwizzledColumns;
#pragma unroll
  for (int group = 0; group < Groups::kOwn; ++group) {
    if (!groups.has(group)) break;
    const auto [a, b, c, d] = pages[group];
    const int four[4] = {a, b, c, d};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const char* const from = multiply_add_wide(four[j], stride, row_0);
      // The numbers of chunks of rows that are j apart differ in the bits of j.
      const uint32_t to =
          (first ^ j * (kSwizzledBytes + 16)) + group * Groups::kPitch * kSwizzledBytes;
#pragma unroll
      for (int column = 0; column < kColumnBlocks; ++column) {
        copy_line_async(to + column * Config::kKeys * kSwizzledBytes,
                        from + column * kSwizzledBytes);
      }
    }
  }
}

// Copies rows of which some are not live and become zeros, or whose pages lie far apart.
template <class Config, bool kOfKeys>
__device__ __forceinline__ void copy_live_tokens(const TokenGroups<Config, kOfKeys>& groups,
                                                 const int32_t* pages, const Interval& live,
                                                 int live_dim, const char* row_0, int64_t stride,
                                                 uint32_t first) {
  using Groups = TokenGroups<Config, kOfKeys>;
  constexpr int kColumnBlocks = (kOfKeys ? Config::kHeadDim : Config::kHeadDimV) / kSwizzledColumns;
#pragma unroll 1
  for (int i = 0; i < Groups::kOwn * 4 && groups.has(i / 4); ++i) {
    const int row = i / 4 * Groups::kPitch + i % 4;  // counted from the lane's first row
    const bool is_live = groups.first_row + row >= live.begin && groups.first_row + row < live.end;
    const char* const from = row_0 + (is_live ? pages[groups.first_row + row] * stride : 0);
    const uint32_t to =
        (first ^ i % 4 * (kSwizzledBytes + 16)) + i / 4 * Groups::kPitch * kSwizzledBytes;
#pragma unroll
    for (int column = 0; column < kColumnBlocks; ++column) {
      const int dim = column * kSwizzledColumns + static_cast<int>(threadIdx.x) % 8 * 8;
      copy_line_or_zero_async(to + column * Config::kKeys * kSwizzledBytes,
                              from + column * kSwizzledBytes, is_live && dim < live_dim);
    }
  }
}

// Waits for a stage and copies the rows of a key tile there. `near`: rows lie less than 2 GB apart.
template <class Config, bool kOfKeys, class Stage>
__device__ __forceinline__ void copy_tokens(const AttentionParams& attention, bool near,
                                            const TokenTile& tile,
                                            const int32_t (&pages)[Config::kKeys], Stage& to,
                                            TransactionBarrier& empty, uint32_t phase,
                                            TransactionBarrier& full) {
  using Groups = TokenGroups<Config, kOfKeys>;
  constexpr int kDim = kOfKeys ? Config::kHeadDim : Config::kHeadDimV;
  const int64_t stride =
      (kOfKeys ? attention.keys.k_page_stride : attention.keys.v_page_stride) * 2;
  const int live_dim = kOfKeys ? attention.head_dim : attention.head_dim_v;
  const Groups groups;
  const uint32_t first = shared_address(swizzled(to, groups.first_row, threadIdx.x % 8));
  const char* const row_0 = (kOfKeys ? tile.k : tile.v) + threadIdx.x % 8 * 16;
  const Interval live = tile.live;
  int4 own[Groups::kOwn];
#pragma unroll
  for (int group = 0; group < Groups::kOwn; ++group) {
    own[group] = *reinterpret_cast<const int4*>(
        &pages[groups.first_row + (groups.has(group) ? group * Groups::kPitch : 0)]);
  }
  empty.wait(phase);
  if (near && live_dim == kDim && live.begin <= 0 && live.end >= Config::kKeys) {
    copy_whole_tokens<Config, kOfKeys>(groups, own, row_0, static_cast<uint32_t>(stride), first);
  } else {
    copy_live_tokens<Config, kOfKeys>(groups, pages, live, live_dim, row_0, stride, first);
  }
  full.arrive_after_copies();
}

// Copies rows. Values follow the keys of the next key tile, in the order that consumers read them.
// Three warps run it.
template <class Config>
__device__ void gather_tokens(const PrefillParams& params, typename Config::SharedMemory& shared) {
  const AttentionParams& attention = params.attention;
  constexpr int64_t kNear = 1 << 30;  // elements
  const bool near = max(attention.keys.k_page_stride, attention.keys.v_page_stride) < kNear;
  auto& tokens = shared.tokens;
  Ring<Config::kStages> k, v;
  Ring<kTokenSlots> of_k, of_v;
  for (bool first = true;; first = false) {
    tokens.full[of_k.stage].wait(of_k.phase);
    const bool more = tokens.tiles[of_k.stage].k != nullptr;
    if (more) {
      copy_tokens<Config, true>(attention, near, tokens.tiles[of_k.stage], tokens.pages[of_k.stage],
                                shared.k[k.stage], shared.k_empty[k.stage], k.phase ^ 1,
                                shared.k_full[k.stage]);
      k.advance();
    }
    if (!first) {
      copy_tokens<Config, false>(attention, near, tokens.tiles[of_v.stage],
                                 tokens.pages[of_v.stage], shared.v[v.stage],
                                 shared.v_empty[v.stage], v.phase ^ 1, shared.v_full[v.stage]);
      v.advance();
      __syncwarp();
      if (threadIdx.x % 32 == 0) tokens.empty[of_v.stage].arrive();
      of_v.advance();
    }
    if (!more) break;
    of_k.advance();
  }
  wait_copies<0>();
}

}  // namespace fovea::kernels::cuda
