// SPDX-License-Identifier: Apache-2.0
// From logits to a token, on the CPU; kernels/cuda/portable/sampling does the same on a GPU. A
// request's draws depend on its seed, the token's position and its own logits only, never on the
// batch it ran in.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fovea/engine.h"

namespace fovea {

// Uniform in [0, 1) with 53 bits: Philox4x32-10 (Salmon et al., SC 2011) with key `seed` and
// counter `position`.
double uniform_at(uint64_t seed, uint64_t position);

struct SampledToken {
  int32_t token = 0;
  float logprob = 0;              // with params.logprobs >= 0
  std::vector<TokenLogprob> top;  // params.logprobs of them, most likely first
};

// Keeps its scratch between calls; one object per thread.
class Sampler {
 public:
  explicit Sampler(int32_t vocabulary);
  // Scratch for each token of the vocabulary.
  static constexpr size_t kBytesPerToken = 20;

  // logits: [vocabulary]. Applies temperature, min_p, top_k and top_p in that order, each to the
  // renormalised rest of the one before. Equal logits rank by id, smallest first. Log-probabilities
  // are those of the unmodified logits. Throws Error{invalid_argument} when a logit is NaN or
  // +inf, or when all are -inf.
  SampledToken sample(std::span<const float> logits, const SamplingParams& params,
                      uint64_t position);

  // ln softmax(logits)[token]. Throws as sample() does.
  static float logprob(std::span<const float> logits, int32_t token);

 private:
  struct Candidate {
    double weight = 0;  // exp((logit - largest) / temperature)
    int32_t token = 0;
  };
  static bool ranks_before(const Candidate& a, const Candidate& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
  }

  int32_t draw(std::span<const float> logits, float largest, const SamplingParams& params,
               uint64_t position);
  // The leading candidates that together hold at least `share` of the weight; returns how many.
  size_t nucleus(double share);
  std::vector<TokenLogprob> most_likely(std::span<const float> logits, double normaliser,
                                        int32_t count);

  std::vector<Candidate> candidates_;
  std::vector<int32_t> order_;
  static_assert(sizeof(Candidate) + sizeof(int32_t) == kBytesPerToken);
};

}  // namespace fovea
