// SPDX-License-Identifier: Apache-2.0
// Queries into registers, keys into shared memory. Rows behind an item's last key are zero, so that
// nothing of another request, and no NaN of an unused slot, can reach a product.
#pragma once

#include "kernels/cuda/common/fp8_values.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/visibility.cuh"
#include "kernels/cuda/portable/mla_decode/config.cuh"

namespace fovea::kernels::cuda {

// A warp's place among those that share its rows. Found anew wherever it is needed: registers are
// short.
template <class C>
struct WarpPlace {
  int first_row;    // of the row tile
  int column_part;  // of the score products
  int first_key;    // of the score products
  int first_value;  // column of the values
  __device__ WarpPlace() {
    const int warp = fresh(threadIdx.x) / 32;
    const int among = warp % C::kSharing;
    first_row = warp / C::kSharing * 16 * C::kRowTiles;
    column_part = among % C::kColumnParts;
    first_key = among / C::kColumnParts * C::kScoreKeys;
    first_value = among * C::kValueColumns;
  }
};

// The a operands of a warp's score products.
template <class C>
struct Queries {
  uint32_t of[C::kRowTiles][C::kSteps][4];
};

// Number of the row tile's rows that exist.
template <class C>
__device__ __forceinline__ int live_rows(const PortableMlaParams& params, const MlaItem& item) {
  return min(C::kRows, item.q_len * params.batch.q_heads - item.first_row);
}

template <class C>
__device__ __forceinline__ void load_queries(const PortableMlaParams& params, const MlaItem& item,
                                             Queries<C>& queries) {
  const WarpPlace<C> place;
  const int lane = threadIdx.x % 32;
  const int live = live_rows<C>(params, item);
  const int first = place.column_part * C::kScoreColumns + lane % 4 * 2;
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = place.first_row + tile * 16 + half * 8 + lane / 4;
      const bool exists = row < live;
      const int packed = item.first_row + (exists ? row : 0);
      const int64_t token = item.q_begin + packed / params.batch.q_heads;
      const int64_t head = packed % params.batch.q_heads;
      const auto* latent = static_cast<const uint16_t*>(params.q_latent) +
                           token * params.q_latent_token_stride + head * params.q_latent_head_stride;
      const auto* rope = static_cast<const uint16_t*>(params.q_rope) +
                         token * params.q_rope_token_stride + head * params.q_rope_head_stride;
#pragma unroll
      for (int step = 0; step < C::kSteps; ++step) {
        const int column = first + step * 16;
        const bool is_latent = C::kColumns == C::kRank || column < C::kRank;
        const auto* from = reinterpret_cast<const uint32_t*>(
            is_latent ? latent + column : rope + (column - C::kRank));
        queries.of[tile][step][half] = exists ? from[0] : 0;
        queries.of[tile][step][half + 2] = exists ? from[4] : 0;
      }
    }
  }
}

template <class C>
__device__ __forceinline__ uint16_t* chunk_of(typename C::Element (&tile)[C::kKeys][C::kColumns],
                                              int row, int chunk) {
  return &tile[row][(chunk ^ row % 8) * 8];
}

// Brings an item's keys to shared memory, tile after tile. A lane has the row of key lane %
// kWarpKeys of its warp.
template <class C>
class KeyLoader {
 public:
  // Starts the first copies.
  __device__ __forceinline__ KeyLoader(const PortableMlaParams& params,
                                       typename C::SharedMemory& shared, const MlaItem& item)
      : params_(params),
        shared_(shared),
        table_(params.page_table + item.request * params.page_table_stride),
        key_(item.key_begin + threadIdx.x / 32 * C::kWarpKeys + threadIdx.x % C::kWarpKeys),
        end_(item.key_end) {
    find_page();
    constexpr int kBegun = C::kFp8 ? C::kRawTiles : C::kTiles - 2;
    for (int tile = 0; tile < kBegun; ++tile) copy(tile);
  }

  // Tile `tile` is complete when all threads have returned and met; the tiles before the last are
  // read no more.
  __device__ __forceinline__ void prepare(int tile) {
    if constexpr (C::kFp8) {
      wait_copies<C::kRawTiles - 1>();
      __syncwarp();  // scales that other lanes copied
      convert(tile);
      __syncwarp();
      copy(tile + C::kRawTiles);
    } else {
      copy(tile + C::kTiles - 2);
      wait_copies<C::kTiles - 2>();
    }
  }

 private:
  __device__ __forceinline__ void find_page() {
    if (key_ < end_) page_ = table_[key_ / params_.page_size];
  }

  // Calls visit(row of the warp, chunk of it, whether both exist) with all lanes.
  template <typename Visit>
  __device__ __forceinline__ static void for_chunks(Visit visit) {
    constexpr int kChunks = C::kWarpKeys * C::kRowChunks;
    constexpr int kUnroll = C::kRows == 64 ? 1 : 3;  // as registers allow
#pragma unroll kUnroll
    for (int base = 0; base < kChunks; base += 32) {
      const int i = base + threadIdx.x % 32;
      visit(i / C::kRowChunks, i % C::kRowChunks, i < kChunks);
    }
  }

  // Groups of copies are counted, so tiles behind the last one are empty groups.
  __device__ __forceinline__ void copy(int tile) {
    const bool live = key_ < end_;
    const int64_t place = key_ % params_.page_size;
    const int64_t row = live ? page_ * params_.page_stride + place * params_.token_stride : -1;
    if (__any_sync(~0u, live)) {
      for_chunks([&](int r, int chunk, bool exists) {
        const int64_t from = __shfl_sync(~0u, row, r % C::kWarpKeys);
        if (exists) copy_chunk(tile, r, chunk, from);
      });
    } else {
      clear(tile);
    }
    if (C::kFp8 && params_.cache_scale_stride != 0) copy_scale(tile, live, place);
    commit_copies();
    key_ += C::kKeys;
    find_page();
  }

  __device__ __forceinline__ void copy_chunk(int tile, int r, int chunk, int64_t from) {
    const int at = threadIdx.x / 32 * C::kWarpKeys + r;
    const char* source = static_cast<const char*>(params_.cache) + (from < 0 ? 0 : from + chunk * 16);
    const int bytes = from < 0 ? 0 : 16;
    if constexpr (C::kFp8) {
      copy_async(&shared_.raw[tile % C::kRawTiles][at][chunk * 16], source, bytes);
    } else {
      copy_async(chunk_of<C>(shared_.keys[tile % C::kTiles], at, chunk), source, bytes);
    }
  }

  // A warp without a key in this tile: its rows still meet weights of 0, and 0 * NaN is NaN.
  __device__ __forceinline__ void clear(int tile) {
    for_chunks([&](int r, int chunk, bool exists) {
      if (exists) copy_chunk(tile, r, chunk, -1);
    });
  }

  // 0 for a row without a key: its weight is 0, and 0 * NaN is NaN.
  __device__ __forceinline__ void copy_scale(int tile, bool live, int64_t place) {
    if (threadIdx.x % 32 >= C::kWarpKeys) return;
    const int at = threadIdx.x / 32 * C::kWarpKeys + threadIdx.x % 32;
    const int64_t slot = live ? int64_t{page_} * params_.page_size + place : 0;
    copy_word_async(&shared_.raw_scale[tile % C::kRawTiles][at], params_.cache_scale + slot,
                    live ? 4 : 0);
  }

  // Every lane what it copied itself.
  __device__ __forceinline__ void convert(int tile) {
    const int first = threadIdx.x / 32 * C::kWarpKeys;
    auto& raw = shared_.raw[tile % C::kRawTiles];
    auto& to = shared_.keys[tile % C::kTiles];
    for_chunks([&](int r, int chunk, bool exists) {
      if (!exists) return;
      const int row = first + r;
      const uint4 bytes = *reinterpret_cast<const uint4*>(&raw[row][chunk * 16]);
      constexpr int kScaleChunk = kMlaRowScaleOffset / 16;
      if (C::kScaled && chunk >= kScaleChunk) {
        constexpr int kRopeChunk = kMlaRowRopeOffset / 16;
        if (chunk >= kRopeChunk) {
          *reinterpret_cast<uint4*>(chunk_of<C>(to, row, C::kRank / 8 + chunk - kRopeChunk)) = bytes;
        }
        return;
      }
      float scale = 1;
      if constexpr (C::kScaled) {
        scale = reinterpret_cast<const float*>(
            &raw[row][kMlaRowScaleOffset])[chunk * 16 / kMlaRowScaleGroup];
      }
      *reinterpret_cast<uint4*>(chunk_of<C>(to, row, 2 * chunk)) =
          widen_chunk<C::kQ, C::kScaled>(bytes.x, bytes.y, scale);
      *reinterpret_cast<uint4*>(chunk_of<C>(to, row, 2 * chunk + 1)) =
          widen_chunk<C::kQ, C::kScaled>(bytes.z, bytes.w, scale);
    });
    if (params_.cache_scale_stride != 0 && threadIdx.x % 32 < C::kWarpKeys) {
      const int row = first + threadIdx.x % 32;
      shared_.key_scale[tile % 2][row] = shared_.raw_scale[tile % C::kRawTiles][row];
    }
  }

  const PortableMlaParams& params_;
  typename C::SharedMemory& shared_;
  const int32_t* table_;
  int key_, end_;  // of the next tile; of the item
  int page_ = 0;      // of the next tile
};

}  // namespace fovea::kernels::cuda
