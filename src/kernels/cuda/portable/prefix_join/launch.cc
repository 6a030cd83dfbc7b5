// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/prefix_join/launch.h"

#include "core/check.h"
#include "core/rounding.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {

gpu::KernelVariant prefix_join_variant(DType out, int sm) {
  const auto type = variant_type(out);
  check_argument(type.has_value(), "no kernel writes {}", dtype_name(out));
  return make_variant(family("portable/prefix_join"), {*type}, sm);
}

void PrefixJoin::run(const PrefixJoinParams& params, gpu::Launcher launcher) const {
  // A request of one token has as many rows as heads.
  const auto blocks = static_cast<uint32_t>(ceil_div(params.batch.q_heads, kJoinWarps));
  kernel_.launch({static_cast<uint32_t>(params.batch.requests), blocks}, params, launcher,
                 kOverlapped);
}

}  // namespace fovea::kernels::cuda
