// SPDX-License-Identifier: Apache-2.0
// Parameter block of sm90/pass_plan, read by host and device code alike.
#pragma once

#include "kernels/cuda/common/decode_params.h"
#include "kernels/cuda/common/plan_launch.h"
#include "kernels/cuda/common/prefill_params.h"

namespace fovea::kernels::cuda {

// Blocks of each plan, 0: the pass has none. In company.prefixes are the arrays of all levels.
struct PassPlanParams {
  DecodePlanParams decode;
  PrefillOrderParams order;
  PlanParams groups;        // of level 0
  GroupParts* group_parts;  // likewise, [tiles, kv_heads]; or null
  PlanCompany company;
  int32_t decode_blocks, order_blocks;
  int32_t table_blocks;
  int32_t decode_rows, group_rows;  // of a row tile: 8 or 16, 64 or 128
};

}  // namespace fovea::kernels::cuda
