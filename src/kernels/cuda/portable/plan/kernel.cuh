// SPDX-License-Identifier: Apache-2.0
// The plan of portable/attention, and that of the groups of a cascade.
#pragma once

#include "kernels/cuda/portable/plan/planner.cuh"

namespace fovea::kernels::cuda {

template <int kRowTile>
using Config = WorkPlanner<kRowTile>;

}  // namespace fovea::kernels::cuda
