// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/mla_merge/launch.h"

#include <string>

#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {

gpu::KernelVariant mla_merge_variant(const MlaMergeSetup& setup) {
  const bool f16_parts = setup.parts == DType::f16;
  return make_variant(family(f16_parts ? "sm90/mla_merge" : "portable/mla_merge"),
                      {std::to_string(setup.row_tile), std::to_string(setup.rank),
                       *variant_type(setup.out), f16_parts ? "f16" : "f32"},
                      setup.sm);
}

void MlaMergeKernel::run(const MlaMergeParams& params, gpu::Launcher launcher) const {
  constexpr uint32_t kBlocksPerSm = 2;
  const GridSize grid{kBlocksPerSm * static_cast<uint32_t>(multiprocessors_)};
  kernel_.launch(grid, params, launcher, kOverlapped);
}

}  // namespace fovea::kernels::cuda
