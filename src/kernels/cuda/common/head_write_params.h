// SPDX-License-Identifier: Apache-2.0
// Parameter block of the kernels that write new keys and values, read by host and device code
// alike.
#pragma once

#include "kernels/cuda/common/attention_params.h"
#include "kernels/cuda/common/layer_params.h"

namespace fovea::kernels::cuda {

// With rotary, heads of q and k are normed before they rotate, if they have a norm. All steps work
// on f32; the head is rounded once, after the last.
struct HeadWriteParams {
  KvWriteParams rows;
  NormWeights q_norm, k_norm;  // [head_dim]
  int32_t tokens;              // rows of the arrays; rows beyond the batch are not written
};

}  // namespace fovea::kernels::cuda
