// SPDX-License-Identifier: Apache-2.0
// The plan of the prefill kernels for Hopper.
#pragma once

#include "gpu/kernel_pack.h"

namespace fovea::kernels::cuda {

// Returns the plan. With segments it cuts tiles into segments of keys.
gpu::KernelVariant prefill_order_variant(bool segments, int sm);

}  // namespace fovea::kernels::cuda
