// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/selective_scan/launch.h"

#include "core/check.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {

std::vector<gpu::KernelVariant> selective_scan_variants(int32_t columns, int sm) {
  check_argument(columns > 0 && columns <= kMaxStateColumns,
                 "no kernel has states of {} columns, at most {}", columns, kMaxStateColumns);
  const char* const padded = columns <= 16 ? "16" : columns <= 64 ? "64" : "256";
  const Family& scan = family("portable/selective_scan");
  const gpu::KernelVariant many = make_variant(scan, {padded, "many"}, sm);
  return {make_variant(scan, {padded, "one"}, sm), many, many};
}

}  // namespace fovea::kernels::cuda
