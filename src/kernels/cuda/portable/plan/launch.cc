// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/plan/launch.h"

#include <string>

#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {

gpu::KernelVariant plan_variant(int32_t row_tile, int sm) {
  return make_variant(family("portable/plan"), {std::to_string(row_tile)}, sm);
}

}  // namespace fovea::kernels::cuda
