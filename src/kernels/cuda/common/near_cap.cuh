// SPDX-License-Identifier: Apache-2.0
// Soft cap of scores that are well below it, without a special function: the powers of the softmax
// keep that unit busy.
#pragma once

#include "kernels/cuda/common/log2.cuh"
#include "kernels/cuda/common/near_cap.h"
#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

// Capped scores, in units of log2, of `kCount` inner scores below kNearInner: inner * a polynomial
// of its square. Side by side, as each waits for its own last operation, and without contractions:
// the same bits wherever it is called.
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

// A capped score of an inner score that is not near, by tanh(x) = 1 - 2 / (e^2x + 1).
__device__ __forceinline__ float cap_far(float inner, float outer) {
  const float power = exp2_fast(__fmul_rn(inner, 2 * kLog2E * kNearTanh / kNearInner));
  return __fmaf_rn(-2 * outer, __fdividef(1.0f, __fadd_rn(power, 1.0f)), outer);
}

}  // namespace fovea::kernels::cuda
