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

// A request that is in_chunks, and its chunks.
struct alignas(16) ChunkWalk {
  int32_t request;
  int32_t first_chunk, chunks;
};

struct ChunkCounts {
  int32_t chunks, walks;
};

// The result of sm90/chunk_plan, which all layers of a pass share.
struct ChunkPlan {
  ChunkSpan* chunks;    // [max_chunks]
  ChunkWalk* walks;     // [max_walks]
  ChunkCounts* counts;  // [1]
  // [max_chunks], for each layer anew: tasks that have stored terms of the chunk, then readers that
  // have seen that all are there. The last reader sets it to 0. Null: nothing is stored.
  uint32_t* progress;
};

struct ChunkPlanParams {
  ChunkPlan plan;
  const StateSpan* spans;  // [requests]
  int32_t requests, max_chunks, max_walks;
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
