// SPDX-License-Identifier: Apache-2.0
// The page table of a batch, which the launch of its plan writes as well: both need nothing but the
// batch, and a launch of its own would cost 2 us. Read by host and device code alike.
#pragma once

#include "kernels/cuda/common/attention_params.h"

namespace fovea::kernels::cuda {

// What a plan kernel takes. The last table_blocks blocks of its grid write the table, the others
// plan.
template <typename Plan>
struct WithPageTable {
  Plan plan;
  PageTableParams pages;
  int32_t table_blocks;  // 0: no table is written
};

}  // namespace fovea::kernels::cuda
