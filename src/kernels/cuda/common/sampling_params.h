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
  int32_t mask = -1;  // row of the masks with the tokens that may be drawn; negative: all may
};

// A token of a row, and the log of its probability without temperature and other rules.
struct LikelyToken {
  int32_t token;
  float logprob;
};

constexpr int32_t kMaxLikeliest = 8;

struct DrawParams {
  float* logits;  // [rows, stride]; those of tokens outside of a row's mask become -inf
  int64_t stride;
  const Draw* draws;  // [grid]
  int32_t* tokens;    // [grid]; -1 if the row is no distribution: it has a NaN, +inf, or only -inf
  int32_t vocabulary;
  const uint32_t* masks = nullptr;  // [rows of masks, mask_words], a bit for each token
  int64_t mask_words = 0;
  // If not 0, at most kMaxLikeliest: the most likely tokens of each row are found, too.
  int32_t likeliest_count = 0;
  LikelyToken* likeliest = nullptr;  // [grid, likeliest_count], the likeliest first
};

// Weights are summed as multiples of 2^-43 of the most likely token's weight, which is exact in any
// order.
constexpr int32_t kWeightBits = 43;
constexpr int32_t kMaxVocabulary = 1 << 20;  // keeps every sum below 2^63

}  // namespace fovea::kernels::cuda
