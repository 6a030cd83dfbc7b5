// SPDX-License-Identifier: Apache-2.0
// Parameters of the prefill of Kimi delta attention in chunks of 64 tokens, read by host and device
// code alike. Its plan is that of gated delta net.
#pragma once

#include "kernels/cuda/common/gdn_params.h"

namespace fovea::kernels::cuda {

// A chunk of keys or queries: columns of boxes side by side, in rows of 128 bytes with the 128-byte
// swizzle, as products read them.
using KdaRows = uint16_t[kGdnDim / kGdnBoxWidth][kGdnChunk][kGdnBoxWidth];

// The part of a chunk in the recurrence of one value head, in bf16. With S the state before the
// chunk, whose rows are values:
//   new values  u_i = sum_j solve_ij (v_j - S recalled_j)
//   next state  S'  = S Diag(decays) + sum_j u_j kept_j^T
//   outputs     o_i = S read_i + sum_j scores_ij u_j
struct alignas(1024) KdaKeyTerms {
  KdaRows recalled;                      // keys times the decays up to their token
  KdaRows kept;                          // keys times the decays after their token
  uint16_t solve[kGdnChunk][kGdnChunk];  // swizzled as the rows above
  float decays[kGdnDim];                 // products over the chunk
};
struct alignas(1024) KdaQueryTerms {
  KdaRows read;  // queries times the scale and the decays up to their token
  uint16_t scores[kGdnChunk][kGdnChunk];
};
struct KdaTerms {
  KdaKeyTerms keys;
  KdaQueryTerms queries;
};

// Parameters of sm90/kda_chunks and sm90/kda_states.
struct alignas(64) KdaPrefillParams {
  TensorMap v;        // [tokens, value_heads * 128], boxes [64, 64]
  const uint16_t* q;  // [tokens, key_heads, 128] bf16
  const uint16_t* k;  // the same
  int64_t q_token_stride, k_token_stride;
  const float* log_decay;  // [tokens, value_heads, 128], ln(alpha)
  const float* beta;       // [tokens, value_heads]
  const StateSpan* spans;
  GdnPlan plan;
  KdaTerms* terms;  // [max_chunks, value_heads]
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
