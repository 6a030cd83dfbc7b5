// SPDX-License-Identifier: Apache-2.0
// The plans of a pass in one launch, on Hopper.
#pragma once

#include "gpu/kernel_pack.h"

namespace fovea::kernels::cuda {

gpu::KernelVariant joint_plan_variant(int sm);

}  // namespace fovea::kernels::cuda
