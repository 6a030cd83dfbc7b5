// SPDX-License-Identifier: Apache-2.0
// What sm_89 and later have an instruction for.
#pragma once

#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

#if __CUDA_ARCH__ >= 890
// Two e4m3 values in the lower half of `two` as f16, exactly; NaN stays NaN.
__device__ __forceinline__ uint32_t widen_e4m3(uint32_t two) {
  uint32_t wide;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide) : "h"(static_cast<uint16_t>(two)));
  return wide;
}
#endif

}  // namespace fovea::kernels::cuda
