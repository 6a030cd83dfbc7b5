// SPDX-License-Identifier: Apache-2.0
// Rows of q, K and V into shared memory. Rows that no key of the item owns are zero, so that nothing
// of another request, and no NaN of an unused slot, can reach a product.
#pragma once

#include "kernels/cuda/common/fp8_values.cuh"
#include "kernels/cuda/portable/attention/config.cuh"

namespace fovea::kernels::cuda {

template <class Config>
__device__ void load_queries(const AttentionParams& params, const Tile& tile,
                             typename Config::SharedMemory& shared) {
  constexpr int kChunks = Config::kHeadDim / 8;
  const auto* q = static_cast<const uint16_t*>(params.q);
#pragma unroll 1
  for (int i = threadIdx.x; i < Config::kRowTile * kChunks; i += Config::kThreads) {
    const int row = i / kChunks;
    const int column = i % kChunks * 8;
    const bool valid = row < tile.rows && column < params.head_dim;
    const int64_t at = valid ? (tile.view.q_begin + tile.token_of(row)) * params.q_token_stride +
                                   tile.head_of(row) * params.q_head_stride + column
                             : 0;
    copy_async(&shared.q[row][column], q + at, valid ? 16 : 0);
  }
}

// The thread's key of a tile: its page, which is read long before it is needed, and place there; of
// packed keys its row. -1: no key of the item.
struct KeyPlace {
  int page = -1;
  int place = 0;
};

template <class Config>
__device__ KeyPlace find_key(const AttentionParams& params, const Tile& tile, int first) {
  const KeyParams& keys = params.keys;
  const int key = first + static_cast<int>(threadIdx.x);
  if (threadIdx.x >= Config::kKeys || key < tile.item.key_begin || key >= tile.item.key_end) return {};
  if (!keys.page_table) return {0, keys.kv_indptr[tile.view.request] + key};
  const int page = key / keys.page_size;
  return {keys.page_table[tile.view.request * keys.page_table_stride + page], key - page * keys.page_size};
}

template <class Config>
__device__ void store_row(const AttentionParams& params, const Tile& tile, const KeyPlace& found,
                          KeyRow (&rows)[Config::kKeys]) {
  if (threadIdx.x >= Config::kKeys) return;
  const KeyParams& keys = params.keys;
  const int64_t head = tile.item.kv_head;
  const int64_t page = max(found.page, 0);
  const int64_t place = found.place;
  const auto row = [](const void* base, int64_t element) {
    return static_cast<const char*>(base) + element * type_bytes(Config::kKv);
  };
  rows[threadIdx.x] = {
      row(keys.k, page * keys.k_page_stride + place * keys.k_token_stride + head * keys.k_head_stride),
      row(keys.v, page * keys.v_page_stride + place * keys.v_token_stride + head * keys.v_head_stride),
      (page * keys.page_size + place) * keys.scale_slot_stride + head * keys.scale_head_stride};
}

// kRowBytes: of a row in shared memory that is filled; live_bytes: what the source row has. Of the
// tile's keys those in `live` are copied, the others become zero.
template <class Config, int kRowBytes>
__device__ void copy_rows(const KeyRow* rows, const char* KeyRow::*row, const Interval& live,
                          int live_bytes, char* to, int to_stride) {
  constexpr int kChunks = kRowBytes / 16;
#pragma unroll 4
  for (int i = threadIdx.x; i < Config::kKeys * kChunks; i += Config::kThreads) {
    const int key = i / kChunks;
    const int byte = i % kChunks * 16;
    const bool valid = key >= live.begin && key < live.end && byte < live_bytes;
    const char* from = rows[key].*row;
    copy_async(to + key * to_stride + byte, valid ? from + byte : from, valid ? 16 : 0);
  }
}

// Starts the copies of a located tile, whose first key is `first`.
template <class Config>
__device__ void load_keys(const AttentionParams& params, const Tile& tile, int first,
                          const KeyRow (&rows)[Config::kKeys], int stage,
                          typename Config::SharedMemory& shared) {
  constexpr int kBytes = type_bytes(Config::kKv);
  const KeyParams& keys = params.keys;
  const Interval live = {tile.item.key_begin - first, tile.item.key_end - first};
  char *k, *v;
  int k_stride, v_stride;
  if constexpr (Config::kConvert) {
    k = reinterpret_cast<char*>(shared.raw_k[stage]);
    v = reinterpret_cast<char*>(shared.raw_v[stage]);
    k_stride = sizeof(shared.raw_k[0][0]);
    v_stride = sizeof(shared.raw_v[0][0]);
    const int key = threadIdx.x;
    if (key < Config::kKeys) {
      const int bytes = key >= live.begin && key < live.end ? 4 : 0;
      if (keys.k_scale) copy_word_async(&shared.k_scale[stage][key], keys.k_scale + rows[key].scale, bytes);
      if (keys.v_scale) copy_word_async(&shared.v_scale[stage][key], keys.v_scale + rows[key].scale, bytes);
    }
  } else {
    k = reinterpret_cast<char*>(shared.k[stage]);
    v = reinterpret_cast<char*>(shared.v[stage]);
    k_stride = sizeof(shared.k[0][0]);
    v_stride = sizeof(shared.v[0][0]);
  }
  copy_rows<Config, Config::kHeadDim * kBytes>(rows, &KeyRow::k, live, params.head_dim * kBytes, k, k_stride);
  copy_rows<Config, Config::kHeadDimV * kBytes>(rows, &KeyRow::v, live, params.head_dim_v * kBytes, v,
                                                v_stride);
}

// 16-bit values of the rows that the thread's warp reads: its own where warps split keys, else all.
template <class Config, int kColumns, int kStride>
__device__ void widen_rows(const uint8_t (&raw)[Config::kKeys][kColumns],
                           uint16_t (&to)[Config::kKeys][kStride]) {
  constexpr int kChunks = kColumns / 8;
  constexpr int kSharers = Config::kSplitsKeys ? 32 : Config::kThreads;
  constexpr int kRows = Config::kSplitsKeys ? Config::kWarpKeys : Config::kKeys;
  const int first = Config::kSplitsKeys ? threadIdx.x / 32 * kRows : 0;
#pragma unroll 2
  for (int i = threadIdx.x % kSharers; i < kRows * kChunks; i += kSharers) {
    const int key = first + i / kChunks;
    const int column = i % kChunks * 8;
    const auto codes = *reinterpret_cast<const uint2*>(&raw[key][column]);
    *reinterpret_cast<uint4*>(&to[key][column]) =
        widen_chunk<Config::kKv, Config::kQ>(codes.x, codes.y);
  }
}

template <class Config>
__device__ void widen_tile(int stage, typename Config::SharedMemory& shared) {
  widen_rows<Config>(shared.raw_k[stage], shared.k[0]);
  widen_rows<Config>(shared.raw_v[stage], shared.v[0]);
  if constexpr (Config::kSplitsKeys) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

}  // namespace fovea::kernels::cuda
