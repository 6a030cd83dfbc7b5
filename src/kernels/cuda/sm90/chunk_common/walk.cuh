// SPDX-License-Identifier: Apache-2.0
// The walks that a block takes states through. A task is 64 values of a value head of one walk,
// because rows of a state do not depend on each other; a block takes every gridDim.x-th one.
#pragma once

#include "kernels/cuda/common/counters.cuh"
#include "kernels/cuda/sm90/chunk_common/tiles.cuh"

namespace fovea::kernels::cuda {

constexpr int kParts = kKeyDim / kBlockValues;  // parts of the rows of a state

// Chunks of one request, and 64 rows of the state of one value head. Tasks of a walk follow one
// another.
struct Walk {
  int head, key_head;
  int value;          // the block's first one in a token's row of values
  int begin, tokens;  // the request from the first chunk on
  int first_chunk, chunks;
  int slot;
  bool from_zero;
  int segment, segments, first_effect;

  __device__ __forceinline__ Walk(const ChunkParams& params, int task) {
    const int parts = params.value_dim / kBlockValues;
    const int tasks = params.value_heads * parts;
    const ChunkWalk walk = params.plan.walks[task / tasks];
    const StateSpan span = params.spans[walk.request];
    head = task % tasks / parts;
    key_head = head / (params.value_heads / params.key_heads);
    value = task % tasks * kBlockValues;
    begin = span.begin + walk.before * kChunkTokens;
    tokens = span.end - begin;
    first_chunk = walk.first_chunk;
    chunks = walk.chunks;
    slot = span.slot;
    from_zero = span.from_zero;
    segment = walk.segment;
    segments = walk.segments;
    first_effect = walk.first_effect;
  }
  // Returns which 64 rows of the state the walk has.
  __device__ __forceinline__ int part() const { return value / kBlockValues % kParts; }
  __device__ __forceinline__ bool is_last() const { return segment + 1 == segments; }
  // Returns whether another walk finds the effect of the same chunks.
  __device__ __forceinline__ bool is_walked_twice() const { return segment > 0 && !is_last(); }
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

// The tasks of a block from `first` on, one in every gridDim.x.
struct BlockTasks {
  int first, count;
  bool finds_effect;  // the only task finds the effect of a segment

  // Blocks of a batch without segments.
  __device__ __forceinline__ explicit BlockTasks(const ChunkParams& params)
      : first(static_cast<int>(blockIdx.x)),
        count(params.plan.counts->walks * heads(params)),
        finds_effect(false) {}

  // For one thread of a block. Blocks of a batch with segments have up to one task each, and take
  // them in the order in which they begin. So a task finds that those before it run or are over,
  // and may wait for them.
  __device__ __forceinline__ static BlockTasks take(const ChunkParams& params) {
    BlockTasks tasks(params);
    const ChunkCounts counts = *params.plan.counts;
    if (counts.early == counts.walks) return tasks;
    tasks.first = static_cast<int>(increment_acquire_release(params.plan.taken, gridDim.x - 1));
    tasks.finds_effect = tasks.first < counts.effects * heads(params);
    return tasks;
  }

  // Calls run(walk) for every task of the block.
  template <typename Run>
  __device__ __forceinline__ void for_each_walk(const ChunkParams& params, Run run) const {
#pragma unroll 1
    for (int task = first; task < count; task += static_cast<int>(gridDim.x)) {
      run(Walk(params, task));
    }
  }

 private:
  // Returns the tasks of a walk.
  __device__ __forceinline__ static int heads(const ChunkParams& params) {
    return params.value_heads * (params.value_dim / kBlockValues);
  }
};

}  // namespace fovea::kernels::cuda
