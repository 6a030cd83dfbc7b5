// SPDX-License-Identifier: Apache-2.0
// Parameters of the prefill of Kimi delta attention in chunks, read by host and device code alike.
#pragma once

#include "kernels/cuda/common/chunk_params.h"

namespace fovea::kernels::cuda {

// A chunk of keys or queries: columns of boxes side by side, in rows of 128 bytes with the 128-byte
// swizzle, as products read them.
using KdaRows = uint16_t[kKeyDim / kBoxWidth][kChunkTokens][kBoxWidth];

// The part of a chunk in the recurrence of one value head, in bf16. With S the state before the
// chunk, whose rows are values:
//   new values  u_i = sum_j solve_ij (v_j - S recalled_j)
//   next state  S'  = S Diag(decays) + sum_j u_j kept_j^T
//   outputs     o_i = S read_i + sum_j scores_ij u_j
struct alignas(1024) KdaKeyTerms {
  KdaRows recalled;                            // keys times the decays up to their token
  KdaRows kept;                                // keys times the decays after their token
  uint16_t solve[kChunkTokens][kChunkTokens];  // swizzled as the rows above
  float decays[kKeyDim];                       // products over the chunk
};
struct alignas(1024) KdaQueryTerms {
  KdaRows read;  // queries times the scale and the decays up to their token
  uint16_t scores[kChunkTokens][kChunkTokens];
};
struct KdaTerms {
  KdaKeyTerms keys;
  KdaQueryTerms queries;
};
constexpr int32_t kKdaReaders = 2;  // warps of a block that read terms: one each for both parts

// Parameters of sm90/kda_chunks and sm90/kda_states.
struct alignas(64) KdaPrefillParams : ChunkParams {
  TensorMap v;        // [tokens, value_heads * 128], boxes [64, 64]
  const uint16_t* q;  // [tokens, key_heads, 128] bf16
  const uint16_t* k;  // the same
  int64_t q_token_stride, k_token_stride;
  const float* log_decay;  // [tokens, value_heads, 128], ln(alpha)
  const float* strength;   // [tokens, value_heads], beta
  KdaTerms* terms;         // [max_chunks, value_heads]
  int32_t l2_normalise;
};

}  // namespace fovea::kernels::cuda
