// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/decode_plan/launch.h"

#include <string>

#include "kernels/cuda/family.h"
#include "kernels/cuda/sm90/choose.h"

namespace fovea::kernels::cuda {

gpu::KernelVariant decode_plan_variant(int32_t row_tile, int sm) {
  constexpr const char* kOverhead = "4";  // units that an item costs besides its keys
  return make_variant(family("sm90/decode_plan"),
                      {std::to_string(row_tile), std::to_string(hopper::kDecodeUnit), kOverhead},
                      sm);
}

}  // namespace fovea::kernels::cuda
