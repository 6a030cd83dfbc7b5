// SPDX-License-Identifier: Apache-2.0
// Score modifiers: the functions between the products of q and k and the softmax, which every
// softmax kernel takes from here. kernels/attention.h defines them for all devices: first the soft
// cap, then ALiBi.
//
// A modifier changes a score in place and knows the score's place. soft_cap() takes scores in units
// of the cap; everything else, the result of modify_score() included, is in units of log2, those of
// exp2_fast(). A kernel whose products have one scale multiplies them by score_unit() first.
#pragma once

#include "kernels/cuda/common/attention_params.h"
#include "kernels/cuda/common/log2.cuh"
#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

// The place of a score in its layer.
struct ScorePlace {
  float slope;   // ALiBi's, in units of log2
  int distance;  // the key's position minus the query's
};

__device__ inline bool modifies_scores(const AttentionParams& params) {
  return params.logit_cap > 0 || params.alibi_slopes != nullptr;
}

// Returns the factor from products to the scores that modify_score() takes.
__device__ inline float score_unit(const AttentionParams& params) {
  return params.logit_cap > 0 ? params.scale / params.logit_cap : params.scale * kLog2E;
}

// Returns the slope of a q head in units of log2.
__device__ inline float slope_of(const AttentionParams& params, int head) {
  return params.alibi_slopes[head] * kLog2E;
}

// Returns the soft cap in units of log2.
__device__ __forceinline__ float cap_of(const AttentionParams& params) {
  return params.logit_cap * kLog2E;
}

// sm90/prefill, which is bound by instructions, caps by near_cap.cuh instead.
__device__ __forceinline__ void soft_cap(const AttentionParams& params, float& score) {
  score = cap_of(params) * tanh_fast(score);
}

__device__ __forceinline__ void add_alibi(const ScorePlace& place, float& score) {
  score += place.slope * static_cast<float>(place.distance);
}

// Applies the layer's modifiers. find_place(ScorePlace&) is called only if a modifier needs the
// place; it returns false for rows that do not exist.
template <typename FindPlace>
__device__ __forceinline__ void modify_score(const AttentionParams& params, float& score,
                                             FindPlace find_place) {
  if (params.logit_cap > 0) soft_cap(params, score);
  ScorePlace place;
  if (params.alibi_slopes && find_place(place)) add_alibi(place, score);
}

}  // namespace fovea::kernels::cuda
