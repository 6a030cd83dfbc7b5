// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/mla_plan/launch.h"

#include <string>

#include "kernels/cuda/family.h"
#include "kernels/cuda/pass_plan.h"

namespace fovea::kernels::cuda {

gpu::KernelVariant mla_plan_variant(int32_t row_tile, int sm) {
  return make_variant(family("portable/mla_plan"), {std::to_string(row_tile)}, sm);
}

void MlaPlan::run(const MlaPlanParams& params, const PlanCompany& company, Stream stream) const {
  launch_plan(kernel_, 1, params, company, stream);
}

}  // namespace fovea::kernels::cuda
