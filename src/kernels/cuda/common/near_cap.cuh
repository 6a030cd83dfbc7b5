// SPDX-License-Identifier: Apache-2.0
// Soft cap of scores well below the cap, by a polynomial: the special function unit is busy with
// the powers of the softmax.
#pragma once

#include "kernels/cuda/common/log2.cuh"
#include "kernels/cuda/common/near_cap.h"
#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

// Caps `kCount` inner scores below kNearInner: inner * a polynomial of its square, in units of
// log2. It interleaves the scores because each step waits for the step before it, and uses explicit
// roundings so that every caller gets the same bits.
template <int kCount>
__device__ __forceinline__ void cap_near(const NearCap& cap, const float (&inner)[kCount],
                                         float (&scores)[kCount]) {
  float square[kCount], sum[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) square[i] = __fmul_rn(inner[i], inner[i]);
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    sum[i] = __fmaf_rn(square[i], cap.terms[kCapTerms - 1], cap.terms[kCapTerms - 2]);
#pragma unroll
  for (int term = kCapTerms - 3; term >= 0; --term) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] = __fmaf_rn(square[i], sum[i], cap.terms[term]);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) scores[i] = __fmul_rn(inner[i], sum[i]);
}

// Caps an inner score that is not near, by tanh(x) = 1 - 2 / (e^2x + 1).
__device__ __forceinline__ float cap_far(float inner, float outer) {
  const float power = exp2_fast(__fmul_rn(inner, 2 * kLog2E * kNearTanh / kNearInner));
  return __fmaf_rn(-2 * outer, __fdividef(1.0f, __fadd_rn(power, 1.0f)), outer);
}

}  // namespace fovea::kernels::cuda
