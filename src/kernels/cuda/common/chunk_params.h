// SPDX-License-Identifier: Apache-2.0
// Parameters that kernels of recurrences over prompts in chunks of 64 tokens share, read by host
// and device code alike. The operations are those of kernels/linear_attention.h.
#pragma once

#include "kernels/cuda/common/linear_params.h"
#include "kernels/cuda/common/tensor_map.h"

namespace fovea::kernels::cuda {

constexpr int32_t kChunkTokens = 64;  // a request's last chunk may have fewer
constexpr int32_t kKeyDim = 128;      // columns of a state
constexpr int32_t kBlockValues = 64;  // rows of a state that a block has
constexpr int32_t kBoxRows = 64;      // tokens of a copied box
constexpr int32_t kBoxWidth = 64;     // its columns

struct alignas(8) ChunkSpan {
  int32_t begin, tokens;  // the first one, and how many
};

// Chunks of a request that is in_chunks: all of them, or a segment of a request that is cut.
struct alignas(16) ChunkWalk {
  int32_t request;
  int32_t first_chunk, chunks;
  int32_t before;             // chunks of the request before the first one
  int32_t segment, segments;  // its number, and those of the request
  int32_t first_effect;       // the request's, in [max_effects]
};

// Half of the rows of a matrix: bf16 values and the remainders, in rows of 128 bytes with the
// 128-byte swizzle, as products read them.
struct alignas(1024) SegmentMatrix {
  uint16_t high[kKeyDim / kBoxWidth][kBlockValues][kBoxWidth];
  uint16_t low[kKeyDim / kBoxWidth][kBlockValues][kBoxWidth];
};

// The effect of a segment on 64 rows of a state S before it, which has 128: S' = S matrix + sums,
// and 64 rows of the matrix. The state before the first segment is known, so its effect is the sums
// alone. These are rows of values, as the threads of a warpgroup have them.
struct SegmentEffect {
  SegmentMatrix matrix;
  float sums[kKeyDim / 4][128][2];
};

// Walks are in the order of tasks: those that find the effect of a segment; then whole requests and
// first segments; then segments that wait for effects.
struct ChunkCounts {
  int32_t chunks, walks;
  int32_t effects;  // walks that find effects
  int32_t early;    // walks that wait for no effect
  int32_t chain;    // chunks that early walks go through while later ones are prepared
};

// The result of sm90/chunk_plan, which all layers of a pass share.
struct ChunkPlan {
  ChunkSpan* chunks;    // [max_chunks]
  ChunkWalk* walks;     // [max_chunked + 2 * max_effects]
  ChunkCounts* counts;  // [1]
  // [max_chunks], for each layer anew: tasks that have stored terms of the chunk, then readers that
  // have seen that all are there. The last reader sets it to 0. Null: nothing is stored.
  uint32_t* progress;
  // With segments, for each layer anew too.
  SegmentEffect* effects;  // [max_effects, value_heads, value_dim / 64]
  uint32_t* found;         // [max_effects, value_heads], counted as progress
  uint32_t* taken;         // [1], tasks that blocks have taken; the last one sets it to 0
};

// How long kernels take, with kCostOfChunk for a chunk of a walk.
constexpr int32_t kCostOfChunk = 256;
struct SegmentCosts {
  int32_t effect;  // a chunk of a walk that finds an effect
  int32_t join;    // the state behind one more effect
  int32_t terms;   // the terms of a chunk, by all multiprocessors
};

struct ChunkPlanParams {
  ChunkPlan plan;
  const StateSpan* spans;  // [requests]
  int32_t requests, max_chunks;
  int32_t max_chunked;  // requests that are in_chunks
  int32_t max_effects;  // 0: no request is cut
  int32_t value_heads;
  int32_t room;         // walks that run at the same time, with all their heads
  int32_t min_segment;  // chunks
  SegmentCosts costs;
};

// The base of the parameters of every kernel that reads a plan.
struct ChunkParams {
  const StateSpan* spans;
  ChunkPlan plan;
  void* state;  // [slots, value_heads, value_dim, 128] of state_type: rows of values
  int64_t state_slot_stride;
  float* out;  // [tokens, value_heads, value_dim]
  int64_t out_token_stride;
  int32_t key_heads, value_heads, value_dim;
  float scale;
  StateType state_type;
  int32_t multiprocessors;
};

}  // namespace fovea::kernels::cuda
