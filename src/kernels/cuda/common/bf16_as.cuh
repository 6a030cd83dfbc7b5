// SPDX-License-Identifier: Apache-2.0
// Conversions of bf16 values for products in another type. f16 represents them exactly from 2^-17
// upward and approximately below; it saturates at 65504.
#pragma once

#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

template <Type kTo>
__device__ __forceinline__ uint32_t bf16_as(uint32_t pair) {
  static_assert(kTo == bf16 || kTo == f16);
  if constexpr (kTo == bf16) return pair;
  uint32_t values;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;"
      : "=r"(values)
      : "f"(__uint_as_float(pair & 0xffff0000)), "f"(__uint_as_float(pair << 16)));
  return values;
}

template <Type kTo>
__device__ __forceinline__ uint4 bf16_as(const uint4& pairs) {
  return {bf16_as<kTo>(pairs.x), bf16_as<kTo>(pairs.y), bf16_as<kTo>(pairs.z),
          bf16_as<kTo>(pairs.w)};
}

}  // namespace fovea::kernels::cuda
