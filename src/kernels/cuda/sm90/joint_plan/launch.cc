// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/joint_plan/launch.h"

#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {

gpu::KernelVariant joint_plan_variant(int sm) {
  const Family& plans = family("sm90/joint_plan");
  return make_variant(plans, plans.baked.front(), sm);
}

}  // namespace fovea::kernels::cuda
