// SPDX-License-Identifier: Apache-2.0
// Log-probabilities in the three forms that clients read.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fovea/engine.h"

namespace fovea::server {

struct ScoredToken {
  int32_t token = 0;
  std::optional<float> logprob;   // unset for the first token of a prompt
  std::vector<TokenLogprob> top;  // the likeliest first
};

// Returns the scores of a prompt from the event that ended its request.
std::vector<ScoredToken> score_prompt(std::span<const int32_t> tokens, const TokenEvent& last);

struct LogprobStyle {
  const Engine* engine = nullptr;
  int32_t top = 0;             // number of likely tokens per position
  bool tokens_as_ids = false;  // "token_id:5" instead of the text
};

// Returns {tokens, token_logprobs, top_logprobs, text_offset} of /v1/completions. Adds the
// characters of the tokens to `offset`.
nlohmann::json completion_logprobs(std::span<const ScoredToken> tokens, const LogprobStyle& style,
                                   int64_t& offset);
// Returns {content: [{token, logprob, bytes, top_logprobs}]} of /v1/chat/completions.
nlohmann::json chat_logprobs(std::span<const ScoredToken> tokens, const LogprobStyle& style);
// Returns vLLM's prompt_logprobs: null, then for each token an object by token id.
nlohmann::json prompt_logprobs(std::span<const ScoredToken> tokens, const LogprobStyle& style);

}  // namespace fovea::server
