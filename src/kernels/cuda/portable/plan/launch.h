// SPDX-License-Identifier: Apache-2.0
// The plan that cuts the row tiles of a batch into a work list.
#pragma once

#include "gpu/kernel_pack.h"

namespace fovea::kernels::cuda {

// Returns the plan for kernels with tiles of row_tile rows.
gpu::KernelVariant plan_variant(int32_t row_tile, int sm);

}  // namespace fovea::kernels::cuda
