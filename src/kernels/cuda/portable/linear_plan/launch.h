// SPDX-License-Identifier: Apache-2.0
// The plan of linear layers on a GPU: the spans of requests and the requests of tokens.
#pragma once

#include "kernels/cuda/common/linear_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

gpu::KernelVariant linear_plan_variant(int sm);

class LinearPlanner {
 public:
  LinearPlanner() = default;
  // Loads the kernel onto the current GPU. Errors as Kernel's constructor.
  LinearPlanner(int sm, gpu::KernelStore& store);

  void run(const LinearPlanParams& params, int32_t requests, gpu::Launcher launcher) const;

 private:
  Kernel kernel_;
};

}  // namespace fovea::kernels::cuda
