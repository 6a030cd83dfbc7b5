// SPDX-License-Identifier: Apache-2.0
// Custom masks, a byte for each (token, key) pair, as bits that a producer warp finds key tile by
// key tile.
#pragma once

#include "kernels/cuda/sm90/common/key_ranges.cuh"

namespace fovea::kernels::cuda {

// Both functions return a bit for each of 32 keys from `first` on: whether the key is 0 or later,
// or lies in the interval.
__device__ __forceinline__ uint32_t keys_from(int first) {
  return first <= 0 ? ~0u : first >= 32 ? 0 : ~0u << first;
}
__device__ __forceinline__ uint32_t interval_bits(const Interval& keys, int first) {
  return keys_from(keys.begin - first) & ~keys_from(keys.end - first);
}

__device__ __forceinline__ const uint8_t* custom_row(const MaskParams& mask,
                                                     const RequestView& view, int token) {
  return mask.custom + mask.custom_indptr[view.request] + static_cast<int64_t>(token) * view.kv_len;
}

// Bytes of a mask that a lane reads at once if they are aligned.
constexpr int kMaskChunk = 16;

// Returns a bit for each byte of a chunk that is not 0.
__device__ __forceinline__ uint32_t shown_in(const uint4& bytes) {
  const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
  uint32_t sums[2] = {};  // bits of 8 bytes each, times 128
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t shown = (((words[i] & 0x7f7f7f7f) + 0x7f7f7f7f) | words[i]) & 0x80808080;
    sums[i / 2] = __dp4a(shown, i % 2 == 0 ? 0x08040201u : 0x80402010u, sums[i / 2]);
  }
  return sums[0] >> 7 | sums[1] << 1;
}

// How a warp shares the rows of a custom mask: a lane takes a chunk of a row's part of a key tile.
// Rows that begin within a chunk take one more lane.
struct MaskLanes {
  int rows;  // at once
  int row, chunk;
};
template <int kChunks>
__device__ __forceinline__ MaskLanes mask_lanes(const MaskParams& mask, const RequestView& view) {
  const auto begin = reinterpret_cast<uint64_t>(custom_row(mask, view, 0));
  const int lane = static_cast<int>(threadIdx.x % 32);
  constexpr int kMore = kChunks + 1;
  if (begin % kMaskChunk == 0 && view.kv_len % kMaskChunk == 0) {
    return {32 / kChunks, lane / kChunks, lane % kChunks};
  }
  return {32 / kMore, lane / kMore, lane % kMore};
}

// Writes what tokens [first, first + count) see of the keys from `start` on, as bits, a word for
// each chunk. Calls ready() before the first word is written.
template <int kChunks, typename Ready>
__device__ __forceinline__ void find_shown(const MaskParams& mask, const RequestView& view,
                                           const MaskLanes& lanes, int first, int count, int start,
                                           uint16_t (*to)[kChunks], Ready ready) {
  constexpr int kLoads = 4;  // at once
  const uint8_t* const begin = custom_row(mask, view, 0);
  const uint8_t* const end = begin + static_cast<int64_t>(view.q_len) * view.kv_len;
  const auto [at_once, row, chunk] = lanes;
  const bool stores = row < at_once && chunk < kChunks;
  const auto row_of = [&](int n) {
    return begin + static_cast<int64_t>(min(first + n, view.q_len - 1)) * view.kv_len + start;
  };
  const auto within = [](const uint8_t* at) {
    return static_cast<int>(reinterpret_cast<uint64_t>(at) % kMaskChunk);
  };
  bool cut = false;  // chunks reach beyond the request's mask
#pragma unroll 1
  for (int from = row; from - row < count; from += kLoads * at_once) {
    uint4 bytes[kLoads] = {};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint8_t* at = row_of(from + i * at_once);
      at += chunk * kMaskChunk - within(at);
      const bool whole = at >= begin && at + kMaskChunk <= end;
      if (whole) bytes[i] = *reinterpret_cast<const uint4*>(at);
      cut |= !whole;
    }
    if (from == row) ready();
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int n = from + i * at_once;
      const uint32_t own = shown_in(bytes[i]);
      const uint32_t bits = (own | __shfl_down_sync(~0u, own, 1) << 16) >> within(row_of(n));
      if (n < count && stores) to[n][chunk] = static_cast<uint16_t>(bits);
    }
  }
  // Both ends of what a token sees by its position grow with the token.
  const MaskParams only = interval_mask(mask);
  const int last = view.q_len - 1;
  const Interval all = visible_keys(only, view, min(first + count - 1, last), min(first, last));
  cut |= __shfl_down_sync(~0u, cut, 1) != 0;
  if ((is_open(all, start, kChunks * kMaskChunk) && !cut) || !stores) return;
  const int key = start + chunk * kMaskChunk;
#pragma unroll 1
  for (int n = row; n < count; n += at_once) {
    const int token = min(first + n, last);
    uint32_t bits = to[n][chunk];
    if (cut) {
      const uint8_t* at = begin + static_cast<int64_t>(token) * view.kv_len + key;
      bits = 0;
#pragma unroll 1
      for (int i = 0; i < min(kMaskChunk, view.kv_len - key); ++i) {
        bits |= static_cast<uint32_t>(at[i] != 0) << i;
      }
    }
    const Interval keys = visible_keys(only, view, token, token);
    to[n][chunk] = static_cast<uint16_t>(bits & interval_bits(keys, key));
  }
}

// Finds the masks of a row tile, as find_masks() does. A warp calls it.
template <class Config>
__device__ __forceinline__ void find_custom_masks(const PrefillParams& params,
                                                  typename Config::SharedMemory& shared,
                                                  const TileSlot& slot, uint32_t& phases) {
  constexpr int kChunks = Config::kKeys / kMaskChunk;
  static_assert(Config::kKeys % 32 == 0);
  const MaskParams& mask = params.attention.batch.mask;
  const WorkTile& work = slot.work;
  const RequestView view = {work.request, work.q_begin, work.q_len, work.kv_len};
  const int tokens = kGroupRows >> params.heads_shift;
  const MaskLanes lanes = mask_lanes<kChunks>(mask, view);
#pragma unroll 1
  for (int block = work.block_end - 1; block >= work.block_begin; --block) {
#pragma unroll 1
    for (int consumer = 0; consumer < Config::kConsumers; ++consumer) {
      auto* const to = reinterpret_cast<uint16_t(*)[kChunks]>(shared.masks.seen[consumer]);
      find_shown<kChunks>(mask, view, lanes, work.first_token + consumer * tokens, tokens,
                          block * Config::kKeys, to,
                          [&] { shared.masks.empty[consumer].wait(~phases >> consumer & 1); });
      phases ^= 1u << consumer;
      __syncwarp();
      if (threadIdx.x % 32 == 0) shared.masks.full[consumer].arrive();
    }
  }
}

}  // namespace fovea::kernels::cuda
