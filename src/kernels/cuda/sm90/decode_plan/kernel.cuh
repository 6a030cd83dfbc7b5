// SPDX-License-Identifier: Apache-2.0
// The plan of sm90/decode alone.
#pragma once

#include "kernels/cuda/sm90/decode_plan/planner.cuh"

namespace fovea::kernels::cuda {

template <int kRowTile, int kGrain, int kOverhead>
using Config = DecodePlanner<kRowTile, kGrain, kOverhead, PlannedRole::alone>;

}  // namespace fovea::kernels::cuda
