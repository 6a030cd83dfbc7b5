// SPDX-License-Identifier: Apache-2.0
// Variants of prefill whose keys threads gather or widen.
#pragma once

#include "kernels/cuda/sm90/common/prefill_setup.h"

namespace fovea::kernels::cuda::prefill_gather {

// Returns whether threads bring the keys of these layers; padded_dims() has dims for them.
bool serves(const AttentionSetup& setup);

// Returns the kernel for one interval of keys per row and a softmax of scaled products.
gpu::KernelVariant plain_variant(const AttentionSetup& setup);
// Returns the kernel for what the plain one cannot express.
gpu::KernelVariant general_variant(const AttentionSetup& setup);
// Returns the baked kernel for parts of the keys of row tiles of 128 rows, or of 64 (`few`), if
// there is one.
std::optional<gpu::KernelVariant> parts_variant(const AttentionSetup& setup, bool few);

}  // namespace fovea::kernels::cuda::prefill_gather
