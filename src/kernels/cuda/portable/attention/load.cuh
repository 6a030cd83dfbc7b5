// SPDX-License-Identifier: Apache-2.0
// Rows of q, K and V into shared memory. Rows that no key of the item owns are zero, so that nothing
// of another request, and no NaN of an unused slot, can reach a product.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/visibility.cuh"
#include "kernels/cuda/portable/attention/config.cuh"

namespace fovea::kernels::cuda {

// What one CTA works on: the item, and where its rows are.
struct Tile {
  WorkItem item;
  RequestView view;
  int group;  // q heads of the kv head
  int rows;   // valid ones, at most kRowTile

  __device__ int token_of(int row) const { return (item.first_row + row) / group; }
  __device__ int head_of(int row) const {
    return item.kv_head * group + (item.first_row + row) % group;
  }
};

template <class Config>
__device__ void load_queries(const AttentionParams& params, const Tile& tile,
                             typename Config::SharedMemory& shared) {
  constexpr int kChunks = Config::kHeadDim / 8;
  const auto* q = static_cast<const uint16_t*>(params.q);
  for (int i = threadIdx.x; i < kRowTile * kChunks; i += kWarps * 32) {
    const int row = i / kChunks;
    const int column = i % kChunks * 8;
    const bool valid = row < tile.rows && column < params.head_dim;
    const int64_t at = valid ? (tile.view.q_begin + tile.token_of(row)) * params.q_token_stride +
                                   tile.head_of(row) * params.q_head_stride + column
                             : 0;
    copy_async(&shared.q[row][column], q + at, valid ? 16 : 0);
  }
}

// Where the keys [first, first + kKeys) are; -1 for keys outside the item.
template <class Config>
__device__ void locate_keys(const AttentionParams& params, const Tile& tile, int first, int stage,
                            typename Config::SharedMemory& shared) {
  const KeyParams& keys = params.keys;
  for (int i = threadIdx.x; i < Config::kKeys; i += kWarps * 32) {
    const int key = first + i;
    int64_t k_row = -1;
    int64_t v_row = -1;
    float k_scale = 1;
    float v_scale = 1;
    if (key >= tile.item.key_begin && key < tile.item.key_end) {
      const int64_t head = tile.item.kv_head;
      if (keys.page_table) {
        const int64_t page =
            keys.page_table[tile.view.request * keys.page_table_stride + key / keys.page_size];
        const int64_t place = key % keys.page_size;
        k_row = page * keys.k_page_stride + place * keys.k_token_stride + head * keys.k_head_stride;
        v_row = page * keys.v_page_stride + place * keys.v_token_stride + head * keys.v_head_stride;
        const int64_t at = (page * keys.page_size + place) * keys.scale_slot_stride +
                           head * keys.scale_head_stride;
        if (keys.k_scale) k_scale = keys.k_scale[at];
        if (keys.v_scale) v_scale = keys.v_scale[at];
      } else {
        const int64_t row = keys.kv_indptr[tile.view.request] + key;
        k_row = row * keys.k_token_stride + head * keys.k_head_stride;
        v_row = row * keys.v_token_stride + head * keys.v_head_stride;
      }
    }
    shared.k_row[stage][i] = k_row;
    shared.v_row[stage][i] = v_row;
    shared.k_scale[stage][i] = k_scale;
    shared.v_scale[stage][i] = v_scale;
  }
}

// kRowBytes: of a row in shared memory that is filled; live_bytes: what the source row has.
template <int kKeys, int kRowBytes>
__device__ void copy_rows(const void* source, const int64_t* rows, int element_bytes, int live_bytes,
                          char* to, int to_stride) {
  constexpr int kChunks = kRowBytes / 16;
  for (int i = threadIdx.x; i < kKeys * kChunks; i += kWarps * 32) {
    const int key = i / kChunks;
    const int byte = i % kChunks * 16;
    const bool valid = rows[key] >= 0 && byte < live_bytes;
    const int64_t at = valid ? rows[key] * element_bytes + byte : 0;
    copy_async(to + key * to_stride + byte, static_cast<const char*>(source) + at, valid ? 16 : 0);
  }
}

// Starts the copies of a located tile.
template <class Config>
__device__ void load_keys(const AttentionParams& params, int stage,
                          typename Config::SharedMemory& shared) {
  constexpr int kBytes = type_bytes(Config::kKv);
  const int live_k = params.head_dim * kBytes;
  const int live_v = params.head_dim_v * kBytes;
  if constexpr (Config::kConvert) {
    copy_rows<Config::kKeys, Config::kHeadDim>(params.keys.k, shared.k_row[stage], 1, live_k,
                                               reinterpret_cast<char*>(shared.raw_k[stage]),
                                               sizeof(shared.raw_k[0][0]));
    copy_rows<Config::kKeys, Config::kHeadDimV>(params.keys.v, shared.v_row[stage], 1, live_v,
                                                reinterpret_cast<char*>(shared.raw_v[stage]),
                                                sizeof(shared.raw_v[0][0]));
  } else {
    copy_rows<Config::kKeys, Config::kHeadDim * kBytes>(
        params.keys.k, shared.k_row[stage], kBytes, live_k,
        reinterpret_cast<char*>(shared.k[stage]), sizeof(shared.k[0][0]));
    copy_rows<Config::kKeys, Config::kHeadDimV * kBytes>(
        params.keys.v, shared.v_row[stage], kBytes, live_v,
        reinterpret_cast<char*>(shared.v[stage]), sizeof(shared.v[0][0]));
  }
}

// Four fp8 values to four 16-bit ones. Every fp8 value is exact in f16 and in bf16: its bits, moved to
// the exponent and mantissa of f16, are off by a power of two that a product repairs.
template <Type kFrom, Type kTo>
__device__ inline uint2 widen(uint32_t four) {
  constexpr int kShift = kFrom == f8e4m3 ? 7 : 8;
  constexpr float kRepair = kFrom == f8e4m3 ? 256.0f : 1.0f;
  float values[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t code = four >> (8 * i) & 0xff;
    const uint16_t half = static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << kShift);
    values[i] = to_float<f16>(half) * kRepair;
  }
  return {pack<kTo>(values[0], values[1]), pack<kTo>(values[2], values[3])};
}

template <Type kFrom, Type kTo, int kKeys, int kColumns, int kStride>
__device__ void widen_rows(const uint8_t (&raw)[kKeys][kColumns], uint16_t (&to)[kKeys][kStride]) {
  constexpr int kWords = kColumns / 4;
  for (int i = threadIdx.x; i < kKeys * kWords; i += kWarps * 32) {
    const int key = i / kWords;
    const int column = i % kWords * 4;
    const uint32_t four = *reinterpret_cast<const uint32_t*>(&raw[key][column]);
    *reinterpret_cast<uint2*>(&to[key][column]) = widen<kFrom, kTo>(four);
  }
}

}  // namespace fovea::kernels::cuda
