// SPDX-License-Identifier: Apache-2.0
// The selective scan of Mamba1 on a GPU, token by token. RecurrentKernels runs its kernels.
#pragma once

#include <vector>

#include "kernels/cuda/kernel.h"
#include "kernels/cuda/portable/recurrence/launch.h"

namespace fovea::kernels::cuda {

// Returns the kernels for states of up to kMaxStateColumns columns as recurrence_variants() does.
// That for any number of tokens also serves few.
std::vector<gpu::KernelVariant> selective_scan_variants(int32_t columns, int sm);

}  // namespace fovea::kernels::cuda
