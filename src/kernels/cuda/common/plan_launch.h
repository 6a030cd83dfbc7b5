// SPDX-License-Identifier: Apache-2.0
// What the launches of all plans have in common. Read by host and device code alike.
#pragma once

#include "kernels/cuda/common/attention_params.h"

namespace fovea::kernels::cuda {

// What runs beside a plan.
struct PlanCompany {
  PageTableParams pages{};  // written by the same launch, if it has requests
  // The launch before is another plan of the same pass. Neither reads what the other writes, so
  // they run at the same time.
  bool behind_plan = false;
};

// What a plan kernel takes. The last table_blocks blocks of its grid write the page table, which
// would cost 2 us as a launch of its own; the others plan.
template <typename Plan>
struct PlanLaunch {
  Plan plan;
  PlanCompany company;
  int32_t table_blocks;  // 0: no table is written
};

}  // namespace fovea::kernels::cuda
