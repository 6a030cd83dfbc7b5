// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block, and the requests that it walks through.
#pragma once

#include "kernels/cuda/common/gdn_params.h"
#include "kernels/cuda/common/hopper.cuh"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/release.cuh"
#include "kernels/cuda/common/ring.cuh"
#include "kernels/cuda/common/wgmma.cuh"

namespace fovea::kernels::cuda {

constexpr int kBoxes = kGdnDim / kGdnBoxWidth;  // boxes side by side of a head's keys
constexpr int kBlockValues = 64;                // rows of a state that a block has
constexpr int kParts = kGdnDim / kBlockValues;  // blocks of a value head
constexpr int kStages = 3;
constexpr int kWarps = 4;  // warps of a warpgroup

using Tile = uint16_t[kGdnChunk][kGdnBoxWidth];
// Outputs of a chunk, rows of tokens with padding, so that rows begin in different banks.
using OutputTile = float[kGdnChunk][kBlockValues + 8];

// A thread of a warpgroup, and its place in matrices of 64 rows, 16 a warp.
struct Place {
  int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
  int warp = thread / 32, lane = thread % 32;
  int row = warp * 16 + lane / 4;  // and row + 8
  int column = lane % 4 * 2;       // and the next one, in every 8 columns
};

// A chunk in shared memory.
struct Stage {
  alignas(1024) Tile k[kBoxes];
  Tile q[kBoxes];
  Tile v;
  GdnTerms terms;
};

// Rows that the warpgroup of states hands over to the one of outputs.
template <typename Rows>
struct Handover {
  alignas(1024) Rows rows;
  TransactionBarrier full, empty;  // warps -> warps

  __device__ __forceinline__ void init() {
    full.init(kWarps);
    empty.init(kWarps);
  }
  // Lets the other warpgroup multiply the rows that this warp has stored.
  __device__ __forceinline__ void hand_over() {
    fence_async_proxy();
    release(full);
  }
};

struct WalkMemory {
  Stage stages[kStages];
  Handover<Tile[kBoxes]> state;  // before the chunk: rows of values
  Handover<Tile> values;         // new values: rows of values, columns of tokens
  alignas(16) OutputTile out;    // 16 rows a warp
  TransactionBarrier full[kStages], empty[kStages];
};

// The chunks and the state of one request and value head. Tasks of a request follow one another.
struct Walk {
  int head, key_head;
  int first_value;  // the first of the block's values of the head
  int begin, tokens;
  int first_chunk, chunks;
  int slot;
  bool from_zero;

  __device__ __forceinline__ Walk(const GdnPrefillParams& params, int task) {
    const int parts = params.value_heads * kParts;
    const GdnWalk walk = params.plan.walks[task / parts];
    const StateSpan span = params.spans[walk.request];
    head = task % parts / kParts;
    key_head = head / (params.value_heads / params.key_heads);
    first_value = task % kParts * kBlockValues;
    begin = span.begin;
    tokens = span.end - span.begin;
    slot = span.slot;
    from_zero = span.from_zero;
    first_chunk = walk.first_chunk;
    chunks = walk.chunks;
  }
};

// Calls run(walk) for every task of the block.
template <typename Run>
__device__ __forceinline__ void for_each_walk(const GdnPrefillParams& params, Run run) {
  const int tasks = params.plan.counts->walks * params.value_heads * kParts;
#pragma unroll 1
  for (int task = static_cast<int>(blockIdx.x); task < tasks; task += static_cast<int>(gridDim.x)) {
    run(Walk(params, task));
  }
}

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

}  // namespace fovea::kernels::cuda
