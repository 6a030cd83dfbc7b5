// SPDX-License-Identifier: Apache-2.0
// Parameters of the prefill in chunks of states that only decay and add: Mamba2 and lightning
// attention. Read by host and device code alike.
#pragma once

#include "kernels/cuda/common/chunk_params.h"

namespace fovea::kernels::cuda {

// S = decay S + strength v k^T, o = scale S q + skip v, with rows of values in S.
struct alignas(64) SsdPrefillParams : ChunkParams {
  TensorMap q, k, v;         // [tokens, heads * dim], boxes [64, 64]
  const float* log_decay;    // [tokens, value_heads], or [value_heads] with a stride of 0
  int64_t log_decay_stride;  // elements from token to token
  const float* strength;     // [tokens, value_heads]; null: 1
  const float* skip;         // [value_heads]; null: 0
};

}  // namespace fovea::kernels::cuda
