// SPDX-License-Identifier: Apache-2.0
// Soft cap of scores that are well below it.
#pragma once

namespace fovea::kernels::cuda {

// outer * tanh(inner * x) to 1.6e-7 of its value for |inner * x| <= kNearTanh, without a special
// function: the powers of the softmax keep that unit busy. A minimax polynomial of (inner * x)^2;
// powers of `inner`, which scales of fp8 make small, would leave the range of floats.
constexpr float kNearTanh = 0.75f;
struct NearCap {
  float inner_square;
  float c[6];
  __device__ __forceinline__ float operator()(float x) const {
    const float square = x * inner_square * x;
    float sum = fmaf(square, c[5], c[4]);
    sum = fmaf(square, sum, c[3]);
    sum = fmaf(square, sum, c[2]);
    sum = fmaf(square, sum, c[1]);
    return x * fmaf(square, sum, c[0]);
  }
};
__device__ __forceinline__ NearCap near_cap(float inner, float outer) {
  const float factor = inner * outer;
  return {inner * inner,
          {factor, -0.333329588f * factor, 0.133254066f * factor, -0.0533444323f * factor,
           0.0195829086f * factor, -0.0047162571f * factor}};
}

}  // namespace fovea::kernels::cuda
