// SPDX-License-Identifier: Apache-2.0
// Recurrences of linear layers over ragged batches. States are updated in place. A state slot of -1
// marks padding: its tokens give 0 and no state is written. States of 16 bits are rounded after
// every token, which reads them before that, or after every chunk.
#pragma once

#include <cstdint>

#include "fovea/dtype.h"

namespace fovea::kernels {

// The tokens and states of requests. A request whose kv_len equals its q_len starts from zero.
struct StateBatch {
  int32_t requests = 0;
  const int32_t* q_indptr = nullptr;     // [requests + 1]
  const int32_t* kv_lens = nullptr;      // [requests]
  const int32_t* state_slots = nullptr;  // [requests]
  // Slots that receive the state after a token, -1: none. Distinct, and not in state_slots.
  const int32_t* snapshot_slots = nullptr;  // [tokens] or null
};

// Depthwise causal convolution over time, then SiLU: y[t, c] = silu(bias[c] + sum_i w[c, i]
// x[t - width + 1 + i, c]); inputs before the request's first token are 0.
struct CausalConvParams {
  StateBatch batch;
  bool plain = false;             // no SiLU
  const float* x = nullptr;       // [tokens, dim]
  const float* weight = nullptr;  // [dim, width]
  const float* bias = nullptr;    // [dim] or null
  float* state = nullptr;         // [slots, dim, width - 1], oldest first
  int64_t state_slot_stride = 0;
  float* y = nullptr;  // [tokens, dim]; not x
  int64_t y_token_stride = 0;
  int32_t dim = 0;
  int32_t width = 0;
};

// Gated delta rule (arXiv:2412.06464): S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t
// k_t^T, o_t = scale * S_t q_t. Value head h uses key head h * key_heads / value_heads.
struct GatedDeltaNetParams {
  StateBatch batch;
  // One row of q, k, v per token, [key_heads * key_dim | key_heads * key_dim | value_heads *
  // value_dim].
  const float* qkv = nullptr;
  const float* log_decay = nullptr;  // [tokens, value_heads], ln(alpha)
  const float* beta = nullptr;       // [tokens, value_heads]
  void* state = nullptr;             // [slots, value_heads, value_dim, key_dim]
  DType state_dtype = DType::f32;    // or bf16 or f16
  int64_t state_slot_stride = 0;
  float* out = nullptr;  // [tokens, value_heads, value_dim]
  int64_t out_token_stride = 0;
  int32_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  float scale = 1;
  bool l2_normalise_qk = false;  // q and k divided by sqrt(sum of squares + 1e-6)
  // Lets kernels compute prompts in chunks, which moves their last bits with the cuts of a prompt.
  bool in_chunks = false;
};

// Mamba2 (arXiv:2405.21060): h_t = e^{a_t} h_{t-1} + dt_t x_t B_t^T, y_t = h_t C_t + D x_t. Head h
// uses group h * groups / heads of B and C.
struct Mamba2Params {
  StateBatch batch;
  // One row of x, B, C per token, [heads * head_dim | groups * state_dim | groups * state_dim].
  const float* xbc = nullptr;
  const float* log_decay = nullptr;  // [tokens, heads], a_t = dt_t * A
  const float* dt = nullptr;         // [tokens, heads]
  const float* skip = nullptr;       // D, [heads] or null
  void* state = nullptr;             // [slots, heads, head_dim, state_dim]
  DType state_dtype = DType::f32;    // or bf16 or f16
  int64_t state_slot_stride = 0;
  float* out = nullptr;  // [tokens, heads, head_dim]
  int64_t out_token_stride = 0;
  int32_t heads = 0, groups = 0, head_dim = 0, state_dim = 0;
  bool in_chunks = false;  // as in GatedDeltaNetParams
};

// Selective scan (arXiv:2312.00752): h_t[c, n] = e^{dt_t[c] A[c, n]} h_{t-1}[c, n] + dt_t[c] x_t[c]
// B_t[n], y_t[c] = sum over n of C_t[n] h_t[c, n] + D[c] x_t[c]. Channel c uses group c * groups /
// channels of B and C.
struct Mamba1Params {
  StateBatch batch;
  // One row of x, B, C per token, [channels | groups * state_dim | groups * state_dim].
  const float* xbc = nullptr;
  const float* a = nullptr;        // [channels, state_dim]
  const float* dt = nullptr;       // [tokens, channels]
  const float* skip = nullptr;     // D, [channels] or null
  void* state = nullptr;           // [slots, channels, state_dim]
  DType state_dtype = DType::f32;  // or bf16 or f16
  int64_t state_slot_stride = 0;
  float* out = nullptr;  // [tokens, channels]
  int64_t out_token_stride = 0;
  int32_t channels = 0, groups = 0, state_dim = 0;
};

// The widest keys of KDA.
inline constexpr int32_t kMaxKdaKeys = 8192;

// Kimi delta attention (arXiv:2510.26692): as GatedDeltaNetParams, with a decay for each column of
// the state: S_t = S_{t-1} Diag(alpha_t) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T.
struct KdaParams {
  StateBatch batch;
  const float* qkv = nullptr;        // as in GatedDeltaNetParams
  const float* log_decay = nullptr;  // [tokens, value_heads, key_dim], ln(alpha)
  const float* beta = nullptr;       // [tokens, value_heads]
  void* state = nullptr;             // [slots, value_heads, value_dim, key_dim]
  DType state_dtype = DType::f32;    // or bf16 or f16
  int64_t state_slot_stride = 0;
  float* out = nullptr;  // [tokens, value_heads, value_dim]
  int64_t out_token_stride = 0;
  int32_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  float scale = 1;
  bool l2_normalise_qk = false;
};

// Lightning attention (arXiv:2401.04658): S_t = lambda S_{t-1} + v_t k_t^T, o_t = scale * S_t q_t,
// with a fixed lambda for each head. Value head h uses key head h * key_heads / value_heads.
struct LightningParams {
  StateBatch batch;
  const float* qkv = nullptr;        // as in GatedDeltaNetParams
  const float* log_decay = nullptr;  // [value_heads], ln(lambda)
  void* state = nullptr;             // [slots, value_heads, value_dim, key_dim]
  DType state_dtype = DType::f32;    // or bf16 or f16
  int64_t state_slot_stride = 0;
  float* out = nullptr;  // [tokens, value_heads, value_dim]
  int64_t out_token_stride = 0;
  int32_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  float scale = 1;
  bool in_chunks = false;  // as in GatedDeltaNetParams
};

}  // namespace fovea::kernels
