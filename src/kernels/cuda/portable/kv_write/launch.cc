// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/kv_write/launch.h"

#include "core/check.h"
#include "core/rounding.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {

gpu::KernelVariant kv_write_variant(DType written, DType stored, int sm) {
  const auto from = variant_type(written), to = variant_type(stored);
  check_argument(from && to, "no kernel writes {} to a cache of {}", dtype_name(written),
                 dtype_name(stored));
  return make_variant(family("portable/kv_write"), {*from, *to}, sm);
}

void KvWrite::run(const HeadWriteParams& params, gpu::Launcher launcher) const {
  const int64_t rows = int64_t{params.tokens} * (params.rows.kv_heads + params.rows.q_heads);
  kernel_.launch({static_cast<uint32_t>(ceil_div(rows, kWriteWarps))}, params, launcher,
                 kOverlapped);
}

}  // namespace fovea::kernels::cuda
