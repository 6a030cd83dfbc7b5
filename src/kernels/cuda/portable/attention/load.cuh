// SPDX-License-Identifier: Apache-2.0
// Copies rows of q, K and V to shared memory. Rows without a key of the item become zero, so that
// no value of another request and no NaN of an unused slot can reach a product.
#pragma once

#include "kernels/cuda/common/bf16_as.cuh"
#include "kernels/cuda/common/fp8_values.cuh"
#include "kernels/cuda/portable/attention/config.cuh"

namespace fovea::kernels::cuda {

// The thread's key of a tile: its page, which is read long before it is needed, and its place
// there. For packed keys `place` is the row. page -1: no key of the item.
struct KeyPlace {
  int page = -1;
  int place = 0;
};

template <class Config>
__device__ KeyPlace find_key(const AttentionParams& params, const Tile& tile, int first) {
  const KeyParams& keys = params.keys;
  const int key = first + static_cast<int>(threadIdx.x);
  if (threadIdx.x >= Config::kKeys || key < tile.item.key_begin || key >= tile.item.key_end)
    return {};
  if (!keys.page_table) return {0, keys.kv_indptr[tile.view.request] + key};
  const bool power = (keys.page_size & (keys.page_size - 1)) == 0;
  const int page = power ? key >> (31 - __clz(keys.page_size)) : key / keys.page_size;
  return {keys.page_table[tile.view.request * keys.page_table_stride + page],
          key - page * keys.page_size};
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
  KeyRow& to = rows[threadIdx.x];
  const int64_t k =
      page * keys.k_page_stride + place * keys.k_token_stride + head * keys.k_head_stride;
  to.k = row(keys.k, k);
  const bool alike = keys.k_page_stride == keys.v_page_stride &&
                     keys.k_token_stride == keys.v_token_stride &&
                     keys.k_head_stride == keys.v_head_stride;
  to.v = row(keys.v, alike ? k
                           : page * keys.v_page_stride + place * keys.v_token_stride +
                                 head * keys.v_head_stride);
  if constexpr (Config::kConvert) {
    to.scale =
        (page * keys.page_size + place) * keys.scale_slot_stride + head * keys.scale_head_stride;
  }
}

// Copies kRows rows of kRowBytes, whose addresses are in shared memory. The source rows have
// live_bytes; the rest, and rows outside `live`, become zero. Eight threads take a row, 128 bytes
// at a time.
template <class Config, int kRows, int kRowBytes, class Row>
__device__ void copy_rows(const Row* rows, const char* Row::*row, const Interval& live,
                          int live_bytes, void* to, int to_stride) {
  constexpr int kChunks = kRowBytes / 16;
  constexpr int kLanes = kChunks < 8 ? kChunks : 8;
  constexpr int kAtOnce = Config::kThreads / kLanes;
  const int own = static_cast<int>(threadIdx.x);
  const int first = own / kLanes;
  const int byte = own % kLanes * 16;
  char* const own_to = static_cast<char*>(to) + first * to_stride + byte;
  if (live.begin <= 0 && live.end >= kRows && live_bytes == kRowBytes) {
    // Reads all addresses first: reads of shared memory after a copy to it would wait for each
    // other.
    constexpr int kOwn = (kRows + kAtOnce - 1) / kAtOnce;
    const char* from[kOwn];
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      if (kRows % kAtOnce != 0 && first + n * kAtOnce >= kRows) break;
      from[n] = rows[first + n * kAtOnce].*row + byte;
    }
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      if (kRows % kAtOnce != 0 && first + n * kAtOnce >= kRows) break;
#pragma unroll
      for (int j = 0; j < kChunks; j += kLanes) {
        if (kChunks % kLanes != 0 && own % kLanes + j >= kChunks) break;
        copy_async(own_to + n * kAtOnce * to_stride + j * 16, from[n] + j * 16, 16);
      }
    }
    return;
  }
#pragma unroll 1
  for (int i = own; i < kRows * kChunks; i += Config::kThreads) {
    const int n = i / kChunks;
    const int at = i % kChunks * 16;
    const bool valid = n >= live.begin && n < live.end && at < live_bytes;
    const char* const from = rows[n].*row;
    copy_async(static_cast<char*>(to) + n * to_stride + at, valid ? from + at : from,
               valid ? 16 : 0);
  }
}

template <class Config>
__device__ void load_queries(const AttentionParams& params, const Tile& tile,
                             typename Config::SharedMemory& shared) {
  constexpr int kBytes = type_bytes(Config::kQ);
  copy_rows<Config, Config::kRowTile, Config::kHeadDim * kBytes>(
      shared.queries, &QueryRow::q, {0, tile.rows}, params.head_dim * kBytes, shared.q,
      sizeof(shared.q[0]));
}

// Converts codes at the start of each row to the whole row; a warp reads all of a row before it
// writes.
template <class Config>
__device__ void widen_queries(typename Config::SharedMemory& shared) {
  constexpr int kChunks = Config::kHeadDim / 8;
  static_assert(kChunks <= 32);
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < Config::kRowTile; row += Config::kWarps) {
    uint2 codes = {};
    if (lane < kChunks) codes = reinterpret_cast<const uint2*>(shared.q[row])[lane];
    __syncwarp();
    if (lane < kChunks) {
      reinterpret_cast<uint4*>(shared.q[row])[lane] = widen_to_f16<false>(codes.x, codes.y, 0);
    }
  }
}

// Converts queries that have been copied to the type of the products.
template <class Config>
__device__ void convert_queries(typename Config::SharedMemory& shared) {
  if constexpr (Config::kMath == Config::kQ) return;
  if constexpr (Config::kQ == f8e4m3) {
    widen_queries<Config>(shared);
  } else {
    constexpr int kChunks = Config::kHeadDim / 8;
    for (int i = threadIdx.x; i < Config::kRowTile * kChunks; i += Config::kThreads) {
      auto& chunk = *reinterpret_cast<uint4*>(&shared.q[i / kChunks][i % kChunks * 8]);
      chunk = bf16_as<Config::kMath>(chunk);
    }
  }
  __syncthreads();
}

// Starts the copies of a tile whose rows are known and whose first key is `first`.
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
      if (keys.k_scale)
        copy_word_async(&shared.k_scale[stage][key], keys.k_scale + rows[key].scale, bytes);
      if (keys.v_scale)
        copy_word_async(&shared.v_scale[stage][key], keys.v_scale + rows[key].scale, bytes);
    }
  } else {
    k = reinterpret_cast<char*>(shared.k[stage]);
    v = reinterpret_cast<char*>(shared.v[stage]);
    k_stride = sizeof(shared.k[0][0]);
    v_stride = sizeof(shared.v[0][0]);
  }
  copy_rows<Config, Config::kKeys, Config::kHeadDim * kBytes>(
      rows, &KeyRow::k, live, params.head_dim * kBytes, k, k_stride);
  copy_rows<Config, Config::kKeys, Config::kHeadDimV * kBytes>(
      rows, &KeyRow::v, live, params.head_dim_v * kBytes, v, v_stride);
}

// Converts the rows that the thread's warp reads to 16-bit values: its own rows if warps split
// keys, otherwise all.
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
    uint4& values = *reinterpret_cast<uint4*>(&to[key][column]);
    if constexpr (Config::kKv == f8e4m3) {
      values = widen_to_f16<false>(codes.x, codes.y, 0);
    } else {
      values = widen_chunk<Config::kKv, f16>(codes.x, codes.y);
    }
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
