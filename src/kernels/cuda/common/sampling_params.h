// SPDX-License-Identifier: Apache-2.0
// Parameter block of the kernel that draws tokens, read by host and device code alike.
#pragma once

#ifdef __CUDACC_RTC__
#include "kernels/cuda/common/types.cuh"
#else
#include <cstdint>
#endif

namespace fovea::kernels::cuda {

// One token to draw, with the fields of fovea::SamplingParams.
struct Draw {
  double uniform;  // in [0, 1)
  int32_t row;     // row of the logits; negative: nothing is drawn
  int32_t top_k;
  float temperature, top_p, min_p;
};

struct DrawParams {
  const float* logits;  // [rows, stride]
  int64_t stride;
  const Draw* draws;  // [grid]
  int32_t* tokens;    // [grid]; -1 if the row is no distribution: it has a NaN, +inf, or only -inf
  int32_t vocabulary;
};

// Weights are summed as multiples of 2^-43 of the most likely token's weight, which is exact in any
// order.
constexpr int32_t kWeightBits = 43;
constexpr int32_t kMaxVocabulary = 1 << 20;  // keeps every sum below 2^63

}  // namespace fovea::kernels::cuda
