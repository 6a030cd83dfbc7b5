// SPDX-License-Identifier: Apache-2.0
// Draws tokens from logits on the CPU; kernels/cuda/portable/sampling does the same on a GPU. A
// draw depends only on the request's seed, the token's position and the logits, never on the batch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/logit_changes.h"
#include "fovea/engine.h"

namespace fovea {

struct SampledToken {
  int32_t token = 0;
  float logprob = 0;              // set if params.logprobs >= 0
  std::vector<TokenLogprob> top;  // the params.logprobs most likely tokens, the likeliest first
};

// Keeps its scratch between calls, so each thread needs its own object.
class Sampler {
 public:
  explicit Sampler(int32_t vocabulary);
  // Bytes of scratch for each token of the vocabulary.
  static constexpr size_t kBytesPerToken = 28;

  // Draws from logits [vocabulary]. Applies temperature, min_p, top_k and top_p in this order and
  // renormalises after each. Equal logits rank by id, the smallest first. Log-probabilities refer
  // to the unmodified logits. Throws Error{invalid_argument} if a logit is NaN or +inf, or if all
  // are -inf.
  SampledToken sample(std::span<const float> logits, const SamplingParams& params,
                      uint64_t position);
  // Works as sample() above at the position after the history, and changes the logits first.
  SampledToken sample(std::span<const float> logits, const SamplingParams& params,
                      const TokenHistory& history);
  // Returns the token that sample() draws for these parameters alone, from the tokens that
  // `allowed` has, a bit for each; an empty mask allows every token.
  int32_t sample_allowed(std::span<const float> logits, const SamplingParams& params,
                         uint64_t position, std::span<const uint64_t> allowed);
  // Returns a given token with the log-probabilities that sample() would return.
  SampledToken score(std::span<const float> logits, int32_t token, int32_t count);

  // Returns ln softmax(logits)[token]. Throws as sample() does.
  static float logprob(std::span<const float> logits, int32_t token);

 private:
  struct Candidate {
    double weight = 0;  // exp((logit - largest) / temperature)
    int32_t token = 0;
  };
  static bool ranks_before(const Candidate& a, const Candidate& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
  }

  int32_t choose(std::span<const float> logits, const SamplingParams& params, uint64_t position);
  int32_t draw(std::span<const float> logits, float largest, const SamplingParams& params,
               uint64_t position);
  // Sorts the leading candidates that together hold at least `share` of the weight to the front.
  // Returns their number.
  size_t nucleus(double share);
  std::vector<TokenLogprob> likeliest(std::span<const float> logits, double normaliser,
                                      int32_t count);

  std::vector<Candidate> candidates_;
  std::vector<int32_t> order_;
  LogitChanges changes_;
  static_assert(sizeof(Candidate) + sizeof(int32_t) + LogitChanges::kBytesPerToken ==
                kBytesPerToken);
};

}  // namespace fovea
