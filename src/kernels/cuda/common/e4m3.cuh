// SPDX-License-Identifier: Apache-2.0
// Conversions of e4m3 for which sm_89 and later have an instruction.
#pragma once

#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

#if __CUDA_ARCH__ >= 890
// Converts the two e4m3 values in the lower half of `two` to f16, exactly. NaN stays NaN.
__device__ __forceinline__ uint32_t widen_e4m3(uint32_t two) {
  uint32_t wide;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide) : "h"(static_cast<uint16_t>(two)));
  return wide;
}
// Converts four e4m3 values.
__device__ __forceinline__ void widen_four_e4m3(uint32_t four, uint32_t& low, uint32_t& high) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}\n"
      : "=r"(low), "=r"(high)
      : "r"(four));
}

// Converts four f32 values with rounding to nearest even and saturation. As pack_here(), it stays
// at its place in the program.
__device__ __forceinline__ uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
  uint32_t four;
  asm volatile(
      "{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(four)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return four;
}
#endif

}  // namespace fovea::kernels::cuda
