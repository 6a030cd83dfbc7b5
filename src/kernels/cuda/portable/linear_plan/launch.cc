// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/linear_plan/launch.h"

#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {

gpu::KernelVariant linear_plan_variant(int sm) {
  return make_variant(family("portable/linear_plan"), {"128"}, sm);
}

LinearPlanner::LinearPlanner(int sm, gpu::KernelStore& store)
    : kernel_(linear_plan_variant(sm), store) {}

void LinearPlanner::run(const LinearPlanParams& params, int32_t requests,
                        gpu::Launcher launcher) const {
  kernel_.launch({static_cast<uint32_t>(requests)}, params, launcher, kOverlapped);
}

}  // namespace fovea::kernels::cuda
