// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block, and the requests that it walks through.
#pragma once

#include "kernels/cuda/common/kda_params.h"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/ring.cuh"
#include "kernels/cuda/sm90/chunk_common/tiles.cuh"

namespace fovea::kernels::cuda {

constexpr int kParts = kGdnDim / kBlockValues;  // blocks of a value head
constexpr int kKeyStages = 3, kQueryStages = 2;

// The part of a chunk that the warpgroup of states takes. Copies end with the decays.
struct KeyStage {
  KdaKeyTerms terms;
  Tile v;
};
constexpr int kKeyBytes = 2 * sizeof(KdaRows) + sizeof(Tile) + kGdnDim * sizeof(float);

struct WalkMemory {
  alignas(1024) KeyStage keys[kKeyStages];
  KdaQueryTerms queries[kQueryStages];  // the part of the warpgroup of outputs
  Handover<Tile[kBoxes]> state;         // before the chunk: rows of values
  Handover<Tile> values;                // new values: rows of values, columns of tokens
  // Copies -> warps -> producers.
  TransactionBarrier keys_full[kKeyStages], keys_empty[kKeyStages];
  TransactionBarrier queries_full[kQueryStages], queries_empty[kQueryStages];
};

// The chunks and the state of one request and value head. Tasks of a request follow one another.
struct Walk {
  int head;
  int first_value;  // the first of the block's values of the head
  int begin, tokens;
  int first_chunk, chunks;
  int slot;
  bool from_zero;

  __device__ __forceinline__ Walk(const KdaPrefillParams& params, int task) {
    const int parts = params.value_heads * kParts;
    const GdnWalk walk = params.plan.walks[task / parts];
    const StateSpan span = params.spans[walk.request];
    head = task % parts / kParts;
    first_value = task % kParts * kBlockValues;
    begin = span.begin;
    tokens = span.end - span.begin;
    slot = span.slot;
    from_zero = span.from_zero;
    first_chunk = walk.first_chunk;
    chunks = walk.chunks;
  }
  // Returns the terms of the n-th chunk.
  __device__ __forceinline__ const KdaTerms& terms(const KdaPrefillParams& params, int n) const {
    return params.terms[static_cast<int64_t>(first_chunk + n) * params.value_heads + head];
  }
};

// Calls run(walk) for every task of the block.
template <typename Run>
__device__ __forceinline__ void for_each_walk(const KdaPrefillParams& params, Run run) {
  const int tasks = params.plan.counts->walks * params.value_heads * kParts;
#pragma unroll 1
  for (int task = static_cast<int>(blockIdx.x); task < tasks; task += static_cast<int>(gridDim.x)) {
    run(Walk(params, task));
  }
}

}  // namespace fovea::kernels::cuda
