// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/mla_row_write/launch.h"

#include "core/check.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {

gpu::KernelVariant mla_row_write_variant(DType written, int sm) {
  const auto type = variant_type(written);
  check_argument(type.has_value(), "no kernel writes rows of {} to an MLA cache",
                 dtype_name(written));
  return make_variant(family("portable/mla_row_write"), {*type}, sm);
}

}  // namespace fovea::kernels::cuda
