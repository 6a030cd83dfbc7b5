// SPDX-License-Identifier: Apache-2.0
// Variants of prefill by fp8 products, where queries and keys are e4m3.
#pragma once

#include "kernels/cuda/sm90/common/prefill_setup.h"

namespace fovea::kernels::cuda::prefill_fp8 {

// Returns whether the family has a kernel for these layers.
bool serves(const AttentionSetup& setup);

// Returns the kernel for one interval of keys per row and a softmax of scaled products.
gpu::KernelVariant plain_variant(const AttentionSetup& setup);
// Returns the kernel for what the plain one cannot express.
gpu::KernelVariant general_variant(const AttentionSetup& setup);

}  // namespace fovea::kernels::cuda::prefill_fp8
