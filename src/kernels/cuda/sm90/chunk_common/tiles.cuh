// SPDX-License-Identifier: Apache-2.0
// Tiles of a chunk of tokens, and rows of states in registers, for kernels that take a state
// through the chunks of a request.
#pragma once

#include "kernels/cuda/common/chunk_params.h"
#include "kernels/cuda/common/hopper.cuh"
#include "kernels/cuda/common/release.cuh"
#include "kernels/cuda/common/wgmma.cuh"

namespace fovea::kernels::cuda {

constexpr int kBoxes = kKeyDim / kBoxWidth;  // boxes side by side of a head's keys
constexpr int kWarps = 4;                    // warps of a warpgroup

using Tile = uint16_t[kChunkTokens][kBoxWidth];
// Outputs of a chunk, rows of tokens with padding, so that rows begin in different banks.
using OutputTile = float[kChunkTokens][kBlockValues + 8];

// A thread of a warpgroup, and its place in matrices of 64 rows, 16 a warp.
struct Place {
  int thread;
  int warp = thread / 32, lane = thread % 32;
  int row = warp * 16 + lane / 4;  // and row + 8
  int column = lane % 4 * 2;       // and the next one, in every 8 columns

  __device__ __forceinline__ explicit Place(int at = static_cast<int>(threadIdx.x) %
                                                     kWarpgroupThreads)
      : thread(at) {}
};

// The same for kernels with few registers: what depends on it is computed at each use and not kept.
struct PlaceAnew : Place {
  __device__ __forceinline__ PlaceAnew() : Place(thread_anew() % kWarpgroupThreads) {}
};

// Rows that a warpgroup hands over to other warps.
template <typename Rows>
struct Handover {
  alignas(1024) Rows rows;
  TransactionBarrier full, empty;  // warps -> warps

  __device__ __forceinline__ void init(int readers = kWarps) {
    full.init(kWarps);
    empty.init(readers);
  }
  // Lets another warpgroup multiply the rows that this warp has stored.
  __device__ __forceinline__ void hand_over() {
    fence_async_proxy();
    release(full);
  }
};

// Returns the address of 8 values in swizzled rows of 128 bytes.
template <typename Rows>
__device__ __forceinline__ auto* swizzled(Rows& tile, int row, int chunk) {
  return &tile[row][(chunk ^ row % 8) * 8];
}

// Rounds sums; the result is also the left operand of a product.
template <Type kType, int kCount>
__device__ __forceinline__ void round(uint32_t (&to)[kCount], const float (&sums)[2 * kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = pack<kType>(sums[2 * i], sums[2 * i + 1]);
}

// bf16 values and what rounding lost of each.
template <int kCount>
struct Split {
  uint32_t high[kCount], low[kCount];

  __device__ __forceinline__ void set(int i, float x, float y) {
    high[i] = pack<bf16>(x, y);
    const float2 rounded = unpack<bf16>(high[i]);
    low[i] = pack<bf16>(x - rounded.x, y - rounded.y);
  }
};

// Stores rounded sums as rows, 8 columns of each for every two registers.
template <int kCount>
__device__ __forceinline__ void store_rounded(Tile* tiles, const uint32_t (&rounded)[kCount]) {
  const Place place;
#pragma unroll
  for (int j = 0; j < kCount / 2; j += 2) {
    const uint32_t r[4] = {rounded[2 * j], rounded[2 * j + 1], rounded[2 * j + 2],
                           rounded[2 * j + 3]};
    store_matrices(
        swizzled(tiles[j / 8], place.warp * 16 + place.lane % 16, j % 8 + place.lane / 16), r);
  }
}

// Sets the rows of a tile from `first` on to 0. A warpgroup calls this for all the tiles of a
// stage, and then finish_clearing().
__device__ __forceinline__ void clear_rows_from(Tile& tile, int first) {
  constexpr int kRowChunks = kBoxWidth / 8;
  const Place place;
  auto* const chunks = reinterpret_cast<uint4*>(tile);
  for (int i = first * kRowChunks + place.thread; i < kChunkTokens * kRowChunks;
       i += kWarpgroupThreads) {
    chunks[i] = {};
  }
}
__device__ __forceinline__ void finish_clearing() {
  fence_async_proxy();
  named_barrier_wait(1, kWarpgroupThreads);
}
// Keys and values of tokens beyond a request belong to others.
__device__ __forceinline__ void clear_rows_from(Tile (&keys)[kBoxes], Tile& values, int first) {
  for (Tile& tile : keys) clear_rows_from(tile, first);
  clear_rows_from(values, first);
  finish_clearing();
}

// Loads values in the layout of sums: two of neighbouring tokens a register.
__device__ __forceinline__ void load_values(uint32_t (&values)[16], const Tile& v) {
  const Place place;
#pragma unroll
  for (int step = 0; step < kChunkTokens / 16; ++step) {
    uint32_t r[4];
    load_matrices_transposed(r, swizzled(v, step * 16 + place.lane / 16 * 8 + place.lane % 8,
                                         place.warp * 2 + place.lane / 8 % 2));
#pragma unroll
    for (int i = 0; i < 4; ++i) values[4 * step + i] = r[i];
  }
}

// Outputs go through shared memory, so that a store fills whole lines: each warp of the warpgroup
// keeps 16 rows of tokens.
__device__ __forceinline__ void keep_outputs(const float (&out)[32], OutputTile& tile) {
  const Place place;
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    float* const row = tile[place.row + i % 4 / 2 * 8];
    *reinterpret_cast<float2*>(row + i / 4 * 8 + place.column) = {out[i], out[i + 1]};
  }
}
// Stores kRows kept rows from `first` on, up to row `count`, at `to`. A warp calls this.
template <int kRows>
__device__ __forceinline__ void store_kept(const OutputTile& tile, int first, float* to,
                                           int64_t token_stride, int count) {
  constexpr int kRowLanes = kBlockValues / 4;
  constexpr int kStep = 32 / kRowLanes;  // rows that a warp stores at once
  constexpr int kBatch = 8;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int column = lane % kRowLanes * 4;
  int row = first + lane / kRowLanes;
  to += row * token_stride + column;
#pragma unroll
  for (int i = 0; i < kRows; i += kBatch * kStep) {
    float4 values[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      values[j] = *reinterpret_cast<const float4*>(&tile[row + j * kStep][column]);
    }
    // Keeps the assembler from moving each load to its store, which would wait for it.
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kBatch; ++j, row += kStep, to += kStep * token_stride) {
      if (row < count) *reinterpret_cast<float4*>(to) = values[j];
    }
  }
}

// Returns the offset of element i of a thread's rows of a state from the first one.
__device__ __forceinline__ int state_offset(int i) { return i % 4 / 2 * 8 * kKeyDim + i / 4 * 8; }

// Loads the thread's elements of a state from the one at `first` of the pool on.
__device__ __forceinline__ void load_state(float (&state)[64], const void* pool, StateType type,
                                           int64_t first) {
#pragma unroll
  for (int i = 0; i < 64; i += 2) {
    const int64_t at = first + state_offset(i);
    const auto* const pair =
        reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(pool) + at);
    float2 two = {0, 0};
    switch (type) {
      case StateType::f32:
        two = *reinterpret_cast<const float2*>(static_cast<const float*>(pool) + at);
        break;
      case StateType::bf16:
        two = unpack<bf16>(*pair);
        break;
      case StateType::f16:
        two = unpack<f16>(*pair);
    }
    state[i] = two.x;
    state[i + 1] = two.y;
  }
}
__device__ __forceinline__ void store_state(const float (&state)[64], void* pool, StateType type,
                                            int64_t first) {
#pragma unroll
  for (int i = 0; i < 64; i += 2) {
    const int64_t at = first + state_offset(i);
    auto* const pair = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(pool) + at);
    switch (type) {
      case StateType::f32:
        *reinterpret_cast<float2*>(static_cast<float*>(pool) + at) = {state[i], state[i + 1]};
        break;
      case StateType::bf16:
        *pair = pack<bf16>(state[i], state[i + 1]);
        break;
      case StateType::f16:
        *pair = pack<f16>(state[i], state[i + 1]);
    }
  }
}

}  // namespace fovea::kernels::cuda
