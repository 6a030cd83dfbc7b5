// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block, and the requests that it walks through.
#pragma once

#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/ring.cuh"
#include "kernels/cuda/sm90/chunk_common/tiles.cuh"

namespace fovea::kernels::cuda {

constexpr int kParts = kGdnDim / kBlockValues;  // blocks of a value head
constexpr int kStages = 3;

// A chunk in shared memory.
struct Stage {
  alignas(1024) Tile k[kBoxes];
  Tile q[kBoxes];
  Tile v;
  GdnTerms terms;
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

}  // namespace fovea::kernels::cuda
