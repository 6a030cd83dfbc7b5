// SPDX-License-Identifier: Apache-2.0
// Parameters of the prefill of gated delta net in chunks of 64 tokens, read by host and device code
// alike. The operation is that of kernels/linear_attention.h.
#pragma once

#include "kernels/cuda/common/linear_params.h"
#include "kernels/cuda/common/tensor_map.h"

namespace fovea::kernels::cuda {

constexpr int32_t kGdnChunk = 64;     // tokens of a chunk; a request's last one may have fewer
constexpr int32_t kGdnDim = 128;      // dimension of keys and values
constexpr int32_t kGdnMaxShare = 8;   // value heads of one key head
constexpr int32_t kGdnBoxRows = 64;   // tokens of a copied box
constexpr int32_t kGdnBoxWidth = 64;  // its columns

struct alignas(8) GdnChunk {
  int32_t begin, tokens;  // the first one, and how many
};

// The part of a chunk in the recurrence of one value head. With S the state before the chunk, whose
// rows are values:
//   new values  u_i = sum_j solve_ij (v_j - recall_j S k_j)
//   outputs     o_i = read_i S q_i + sum_j scores_ij u_j
//   next state  S'  = decay S + sum_j keep_j u_j k_j^T
// The matrices are bf16 in rows of 128 bytes with the 128-byte swizzle, as products read them.
struct alignas(1024) GdnTerms {
  uint16_t solve[kGdnChunk][kGdnChunk];
  uint16_t scores[kGdnChunk][kGdnChunk];
  float recall_keep[kGdnChunk / 2][4];  // two tokens each: recall of both, then keep of both
  float read[kGdnChunk];
  float decay;
};

// A request that is in_chunks, and its chunks.
struct alignas(16) GdnWalk {
  int32_t request;
  int32_t first_chunk, chunks;
};

struct GdnCounts {
  int32_t chunks, walks;
};

// The result of sm90/gdn_plan, which all layers of a pass share.
struct GdnPlan {
  GdnChunk* chunks;   // [max_chunks]
  GdnWalk* walks;     // [max_walks]
  GdnCounts* counts;  // [1]
};

struct GdnPlanParams {
  GdnPlan plan;
  const StateSpan* spans;  // [requests]
  int32_t requests, max_chunks, max_walks;
};

// Parameters of sm90/gdn_chunks and sm90/gdn_states.
struct alignas(64) GdnPrefillParams {
  TensorMap q, k, v;       // [tokens, heads * 128], boxes [64, 64]
  const float* log_decay;  // [tokens, value_heads], ln(alpha)
  const float* beta;       // [tokens, value_heads]
  const StateSpan* spans;
  GdnPlan plan;
  GdnTerms* terms;  // [max_chunks, value_heads]
  void* state;      // [slots, value_heads, 128, 128] of state_type: rows of values
  int64_t state_slot_stride;
  float* out;  // [tokens, value_heads, 128]
  int64_t out_token_stride;
  int32_t key_heads, value_heads;
  float scale;
  int32_t l2_normalise;
  StateType state_type;
};

}  // namespace fovea::kernels::cuda
