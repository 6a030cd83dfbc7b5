// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

#include "kernels/cpu/simd/isas.h"
#include "kernels/linear_attention.h"

namespace fovea::kernels::cpu {

// The new tokens of one request and the place of its state.
struct StateSpan {
  int64_t begin = 0, end = 0;
  int64_t slot = 0;
  bool from_zero = false;  // the slot holds no state of this request yet
};

// The rows of one head's state that a task computes for all tokens.
struct HeadRange {
  int32_t head = 0;
  int32_t row_begin = 0, row_end = 0;
};

// Tokens of a chunk, and the widest keys of layers that are computed in chunks.
inline constexpr int32_t kChunkTokens = 32;
inline constexpr int32_t kMaxChunkKeys = 256;

// A gated delta net, Mamba2 or lightning attention as products over chunks see it: u_t = beta_t
// (v_t - alpha_t S_t-1 k_t) with `delta`, else beta_t v_t; S_t = alpha_t S_t-1 + u_t k_t^T; o_t =
// S_t q_t + skip v_t.
struct ChunkedLayer {
  StateBatch batch;
  const float *q = nullptr, *k = nullptr, *v = nullptr;  // token 0
  int64_t token_stride = 0;                              // elements
  // [tokens, value_heads], or [value_heads] with fixed_decay.
  const float* log_decay = nullptr;
  bool fixed_decay = false;
  const float* beta = nullptr;  // [tokens, value_heads]; null: 1
  const float* skip = nullptr;  // [value_heads] or null
  void* state = nullptr;        // [slots, value_heads, value_dim, key_dim] of state_dtype
  DType state_dtype = DType::f32;
  int64_t state_slot_stride = 0;
  float* out = nullptr;  // [tokens, value_heads, value_dim]
  int64_t out_token_stride = 0;
  int32_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  float scale = 1;
  bool l2_normalise_qk = false;
  bool delta = false;
};

#define FOVEA_DECLARE(isa)                                                                         \
  namespace isa {                                                                                  \
  void convolve_channels(const CausalConvParams& params, const StateSpan& span, int32_t begin,     \
                         int32_t end);                                                             \
  void gated_delta_net_rows(const GatedDeltaNetParams& params, const StateSpan& span,              \
                            const HeadRange& range);                                               \
  void mamba2_rows(const Mamba2Params& params, const StateSpan& span, const HeadRange& range);     \
  /* The channels of a range are those of a group of B and C. */                                   \
  void mamba1_rows(const Mamba1Params& params, const StateSpan& span, const HeadRange& range);     \
  void kda_rows(const KdaParams& params, const StateSpan& span, const HeadRange& range);           \
  void lightning_rows(const LightningParams& params, const StateSpan& span,                        \
                      const HeadRange& range);                                                     \
  /* Rows [begin, end) of [value_heads, value_dim]; key_dim is kMaxChunkKeys or less. */           \
  void chunked_rows(const ChunkedLayer& layer, const StateSpan& span, int64_t begin, int64_t end); \
  }
FOVEA_FOR_EACH_ISA(FOVEA_DECLARE)
#undef FOVEA_DECLARE

}  // namespace fovea::kernels::cpu
