// SPDX-License-Identifier: Apache-2.0
// Tables of rotary positions, read by host and device code alike.
#pragma once

#ifdef __CUDACC_RTC__
#include "kernels/cuda/common/types.cuh"
#else
#include <cstdint>
#endif

namespace fovea::kernels::cuda {

struct RotaryParams {
  const float* cos;  // [max_positions, rotary_dim / 2]; null: no rotation
  const float* sin;
  int32_t max_positions;  // positions outside [0, max_positions) count as 0
  int32_t rotary_dim;
  int32_t interleaved;
};

}  // namespace fovea::kernels::cuda
