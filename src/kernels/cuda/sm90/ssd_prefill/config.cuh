// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block, and the requests that it walks through.
#pragma once

#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/ring.cuh"
#include "kernels/cuda/common/scan.cuh"
#include "kernels/cuda/common/ssd_params.h"
#include "kernels/cuda/sm90/chunk_common/tiles.cuh"

namespace fovea::kernels::cuda {

constexpr int kStages = 4;
static_assert(kSsdValues == kBlockValues);

// The factors of the tokens of a chunk. decays are log2 of the product up to each token.
struct SsdFactors {
  float decays[kGdnChunk], strengths[kGdnChunk];
  float read[kGdnChunk];  // times the state before the chunk: its part in each token's output
  float keep[kGdnChunk];  // times each token's value: its part in the next state
  float decay;            // times the state: its part in the next one
};

// A chunk in shared memory.
struct SsdStage {
  alignas(1024) Tile k[kBoxes];
  Tile q[kBoxes];
  Tile v;
  SsdFactors factors;
};

struct SsdMemory {
  SsdStage stages[kStages];
  Handover<Tile[kBoxes]> state;  // before the chunk: rows of values
  alignas(16) OutputTile out;    // 16 rows a warp
  TransactionBarrier full[kStages], empty[kStages];
};

// The chunks and 64 rows of the state of one request and value head.
struct SsdWalk {
  int head, key_head;
  int first_value;  // the first of the block's values of the head
  int begin, tokens;
  int chunks;
  int slot;
  bool from_zero;

  __device__ __forceinline__ SsdWalk(const SsdPrefillParams& params, int task) {
    const int parts = params.value_dim / kBlockValues;
    const int tasks = params.value_heads * parts;
    const GdnWalk walk = params.plan.walks[task / tasks];
    const StateSpan span = params.spans[walk.request];
    head = task % tasks / parts;
    key_head = head / (params.value_heads / params.key_heads);
    first_value = task % parts * kBlockValues;
    begin = span.begin;
    tokens = span.end - span.begin;
    chunks = walk.chunks;
    slot = span.slot;
    from_zero = span.from_zero;
  }
  // Returns the index of the block's first value in a token's row of values.
  __device__ __forceinline__ int value(const SsdPrefillParams& params) const {
    return head * params.value_dim + first_value;
  }
};

// Calls run(walk) for every task of the block.
template <typename Run>
__device__ __forceinline__ void for_each_walk(const SsdPrefillParams& params, Run run) {
  const int tasks =
      params.plan.counts->walks * params.value_heads * (params.value_dim / kBlockValues);
#pragma unroll 1
  for (int task = static_cast<int>(blockIdx.x); task < tasks; task += static_cast<int>(gridDim.x)) {
    run(SsdWalk(params, task));
  }
}

}  // namespace fovea::kernels::cuda
