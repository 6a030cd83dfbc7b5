// SPDX-License-Identifier: Apache-2.0
#include "engine/logit_changes.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace fovea {
namespace {

constexpr int32_t kPrompt = -1;

bool penalises(const SamplingParams& params) {
  return params.repetition_penalty != 1 || params.frequency_penalty != 0 ||
         params.presence_penalty != 0;
}

}  // namespace

bool changes_logits(const SamplingParams& params, int32_t generated) {
  return !params.logit_bias.empty() || penalises(params) || generated < params.min_tokens;
}

LogitChanges::LogitChanges(int32_t vocabulary) : uses_(static_cast<size_t>(vocabulary)) {
  logits_.reserve(static_cast<size_t>(vocabulary));
}

std::span<const float> LogitChanges::apply(std::span<const float> logits,
                                           const SamplingParams& params,
                                           const TokenHistory& history) {
  logits_.assign(logits.begin(), logits.end());
  for (const auto& [token, bias] : params.logit_bias) logits_[static_cast<size_t>(token)] += bias;
  if (penalises(params)) penalise(params, history);
  if (history.output.size() < static_cast<size_t>(params.min_tokens)) {
    if (!params.ignore_eos) forbid(history.ends);
    forbid(params.stop_tokens);
  }
  if (!history.allowed.empty()) allow_only(history.allowed);
  return logits_;
}

std::span<const float> LogitChanges::mask(std::span<const float> logits,
                                          std::span<const uint64_t> allowed) {
  logits_.assign(logits.begin(), logits.end());
  allow_only(allowed);
  return logits_;
}

void LogitChanges::allow_only(std::span<const uint64_t> allowed) {
  for (size_t i = 0; i < logits_.size(); ++i) {
    if ((allowed[i / 64] >> (i % 64) & 1) == 0)
      logits_[i] = -std::numeric_limits<float>::infinity();
  }
}

void LogitChanges::penalise(const SamplingParams& params, const TokenHistory& history) {
  for (const int32_t token : history.prompt) uses_[static_cast<size_t>(token)] = kPrompt;
  for (const int32_t token : history.output) {
    int32_t& uses = uses_[static_cast<size_t>(token)];
    uses = std::max(uses, 0) + 1;
  }
  for (const std::span<const int32_t> tokens : {history.prompt, history.output}) {
    for (const int32_t token : tokens) {
      // The second mention of a token finds 0.
      const int32_t uses = std::exchange(uses_[static_cast<size_t>(token)], 0);
      if (uses == 0) continue;
      float& logit = logits_[static_cast<size_t>(token)];
      logit = logit > 0 ? logit / params.repetition_penalty : logit * params.repetition_penalty;
      if (uses == kPrompt) continue;
      logit -= params.frequency_penalty * static_cast<float>(uses) + params.presence_penalty;
    }
  }
}

void LogitChanges::forbid(std::span<const int32_t> tokens) {
  for (const int32_t token : tokens) {
    logits_[static_cast<size_t>(token)] = -std::numeric_limits<float>::infinity();
  }
}

}  // namespace fovea
