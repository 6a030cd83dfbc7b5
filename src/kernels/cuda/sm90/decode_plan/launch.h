// SPDX-License-Identifier: Apache-2.0
// The plan of sm90/decode.
#pragma once

#include "gpu/kernel_pack.h"

namespace fovea::kernels::cuda {

// Returns the plan for kernels with tiles of row_tile rows.
gpu::KernelVariant decode_plan_variant(int32_t row_tile, int sm);

}  // namespace fovea::kernels::cuda
