// SPDX-License-Identifier: Apache-2.0
// Parameters of the prefill in chunks of states that only decay and add: Mamba2 and lightning
// attention. Read by host and device code alike.
#pragma once

#include "kernels/cuda/common/gdn_params.h"

namespace fovea::kernels::cuda {

constexpr int32_t kSsdValues = 64;  // values of a block; divides value_dim

// S = decay S + strength v k^T, o = scale S q + skip v, with rows of values in S.
struct alignas(64) SsdPrefillParams {
  TensorMap q, k, v;         // [tokens, heads * dim], boxes [64, 64]
  const float* log_decay;    // [tokens, value_heads], or [value_heads] with a stride of 0
  int64_t log_decay_stride;  // elements from token to token
  const float* strength;     // [tokens, value_heads]; null: 1
  const float* skip;         // [value_heads]; null: 0
  const StateSpan* spans;
  GdnPlan plan;
  void* state;  // [slots, value_heads, value_dim, 128] of state_type: rows of values
  int64_t state_slot_stride;
  float* out;  // [tokens, value_heads, value_dim]
  int64_t out_token_stride;
  int32_t key_heads, value_heads, value_dim;
  float scale;
  StateType state_type;
};

}  // namespace fovea::kernels::cuda
