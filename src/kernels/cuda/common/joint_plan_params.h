// SPDX-License-Identifier: Apache-2.0
// Parameters of sm90/joint_plan. Read by host and device code alike.
#pragma once

#include "kernels/cuda/common/decode_params.h"
#include "kernels/cuda/common/plan_kernel_params.h"
#include "kernels/cuda/common/prefill_params.h"

namespace fovea::kernels::cuda {

// The plans of a pass. A plan that the pass does not have has no blocks.
struct JointPlanParams {
  DecodePlanParams decode;
  PrefillOrderParams order;
  PlanParams groups;        // level 0 of a cascade
  GroupParts* group_parts;  // level 0, [tiles, kv_heads]; or null
  PlanTasks tasks;          // prefixes: the arrays of all levels
  int32_t decode_blocks, order_blocks;
  int32_t table_blocks;
  int32_t decode_rows;  // rows of a row tile: 8 or 16
  int32_t group_rows;   // rows of a row tile: 64 or 128
};

}  // namespace fovea::kernels::cuda
