// SPDX-License-Identifier: Apache-2.0
// Changes logits before a token is drawn: biases, penalties, and ends that come too early.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fovea/engine.h"

namespace fovea {

// The tokens before the one that is drawn, the end-of-sequence tokens of the model, and the tokens
// that a grammar allows, a bit for each; without a grammar it is empty.
struct TokenHistory {
  std::span<const int32_t> prompt, output, ends;
  std::span<const uint64_t> allowed = {};
};

// Returns true if `params` change the logits after `generated` tokens.
bool changes_logits(const SamplingParams& params, int32_t generated);

class LogitChanges {
 public:
  explicit LogitChanges(int32_t vocabulary);
  // Bytes of scratch for each token of the vocabulary.
  static constexpr size_t kBytesPerToken = sizeof(float) + sizeof(int32_t);

  // Returns the changed logits [vocabulary], valid until the next call.
  std::span<const float> apply(std::span<const float> logits, const SamplingParams& params,
                               const TokenHistory& history);
  // Returns the logits with -inf for tokens that `allowed` lacks, valid until the next call.
  std::span<const float> mask(std::span<const float> logits, std::span<const uint64_t> allowed);

 private:
  void penalise(const SamplingParams& params, const TokenHistory& history);
  void forbid(std::span<const int32_t> tokens);
  void allow_only(std::span<const uint64_t> allowed);

  std::vector<float> logits_;
  std::vector<int32_t> uses_;  // per token: its number in the output; kPrompt if only in the prompt
};

}  // namespace fovea
