// SPDX-License-Identifier: Apache-2.0
// The plan of MLA decode: from lengths on the device to the work list of all layers.
#pragma once

#include "kernels/cuda/common/mla_params.h"
#include "kernels/cuda/kernel.h"
#include "kernels/cuda/plan_queue.h"

namespace fovea::kernels::cuda {

// Returns the kernel for row tiles of 16, 32, 64 or 128 rows.
gpu::KernelVariant mla_plan_variant(int32_t row_tile, int sm);

class MlaPlan {
 public:
  MlaPlan() = default;
  // Loads the kernel onto the current GPU. Errors as Kernel's constructor.
  MlaPlan(int32_t row_tile, int sm, gpu::KernelStore& store)
      : kernel_(mla_plan_variant(row_tile, sm), store) {}

  // Adds the plan to those of the pass.
  void add(const MlaPlanParams& params, PlanQueue& plans) const { plans.add(kernel_, params); }

 private:
  Kernel kernel_;
};

}  // namespace fovea::kernels::cuda
