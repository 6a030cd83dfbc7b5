// SPDX-License-Identifier: Apache-2.0
// The requests that a block takes states through. A task is 64 values of a value head of one
// request, because rows of a state do not depend on each other; a block takes every gridDim.x-th
// one.
#pragma once

#include "kernels/cuda/sm90/chunk_common/tiles.cuh"

namespace fovea::kernels::cuda {

// The chunks and 64 rows of the state of one request and value head. Tasks of a request follow one
// another.
struct Walk {
  int head, key_head;
  int value;  // the block's first one in a token's row of values
  int begin, tokens;
  int first_chunk, chunks;
  int slot;
  bool from_zero;

  __device__ __forceinline__ Walk(const ChunkParams& params, int task) {
    const int parts = params.value_dim / kBlockValues;
    const int tasks = params.value_heads * parts;
    const ChunkWalk walk = params.plan.walks[task / tasks];
    const StateSpan span = params.spans[walk.request];
    head = task % tasks / parts;
    key_head = head / (params.value_heads / params.key_heads);
    value = task % tasks * kBlockValues;
    begin = span.begin;
    tokens = span.end - span.begin;
    first_chunk = walk.first_chunk;
    chunks = walk.chunks;
    slot = span.slot;
    from_zero = span.from_zero;
  }
  // Returns the index of the thread's first element of the state in the pool.
  __device__ __forceinline__ int64_t state(const ChunkParams& params) const {
    const Place place;
    return slot * params.state_slot_stride + (static_cast<int64_t>(value) + place.row) * kKeyDim +
           place.column;
  }
  // Returns the index of the n-th chunk and the head in arrays of [chunks, value_heads].
  __device__ __forceinline__ int64_t term(const ChunkParams& params, int n) const {
    return static_cast<int64_t>(first_chunk + n) * params.value_heads + head;
  }
  // Returns the block's outputs of the request's token `first`.
  __device__ __forceinline__ float* out(const ChunkParams& params, int first) const {
    return params.out + (begin + first) * params.out_token_stride + value;
  }
};

// Calls run(walk) for every task of the block.
template <typename Run>
__device__ __forceinline__ void for_each_walk(const ChunkParams& params, Run run) {
  const int tasks =
      params.plan.counts->walks * params.value_heads * (params.value_dim / kBlockValues);
#pragma unroll 1
  for (int task = static_cast<int>(blockIdx.x); task < tasks; task += static_cast<int>(gridDim.x)) {
    run(Walk(params, task));
  }
}

}  // namespace fovea::kernels::cuda
