// SPDX-License-Identifier: Apache-2.0
// Replaces src/kernels/cuda/common/e4m3.cuh.
#pragma once

#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

inline uint32_t widen_e4m3(uint32_t two) {
  return pack<f16>(f8e4m3_to_float(static_cast<uint8_t>(two)),
                   f8e4m3_to_float(static_cast<uint8_t>(two >> 8)));
}

inline void widen_four_e4m3(uint32_t four, uint32_t& low, uint32_t& high) {
  low = widen_e4m3(four);
  high = widen_e4m3(four >> 16);
}
inline uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
  return float_to_f8e4m3(x0) | float_to_f8e4m3(x1) << 8 | float_to_f8e4m3(x2) << 16 |
         static_cast<uint32_t>(float_to_f8e4m3(x3)) << 24;
}

}  // namespace fovea::kernels::cuda
