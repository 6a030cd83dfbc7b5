// SPDX-License-Identifier: Apache-2.0
// Parameters of the prefill of gated delta net in chunks, read by host and device code alike.
#pragma once

#include "kernels/cuda/common/chunk_params.h"

namespace fovea::kernels::cuda {

constexpr int32_t kGdnMaxShare = 8;  // value heads of one key head

// The part of a chunk in the recurrence of one value head. With S the state before the chunk, whose
// rows are values:
//   new values  u_i = sum_j solve_ij (v_j - recall_j S k_j)
//   outputs     o_i = read_i S q_i + sum_j scores_ij u_j
//   next state  S'  = decay S + sum_j keep_j u_j k_j^T
// The matrices are bf16 in rows of 128 bytes with the 128-byte swizzle, as products read them.
struct alignas(1024) GdnStateTerms {
  uint16_t solve[kChunkTokens][kChunkTokens];
  float recall_keep[kChunkTokens / 2][4];  // two tokens each: recall of both, then keep of both
  float read[kChunkTokens];
  float decay;
};
struct GdnTerms : GdnStateTerms {
  alignas(1024) uint16_t scores[kChunkTokens][kChunkTokens];
};

// Parameters of sm90/gdn_chunks and sm90/gdn_states.
struct alignas(64) GdnPrefillParams : ChunkParams {
  TensorMap q, k, v;       // [tokens, heads * 128], boxes [64, 64]
  const float* log_decay;  // [tokens, value_heads], ln(alpha)
  const float* strength;   // [tokens, value_heads], beta
  GdnTerms* terms;         // [max_chunks, value_heads]
  int32_t l2_normalise;
};

}  // namespace fovea::kernels::cuda
