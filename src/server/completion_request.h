// SPDX-License-Identifier: Apache-2.0
// Bodies of /v1/completions and /v1/chat/completions, checked and turned into requests.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/engine_service.h"
#include "server/tools.h"

namespace fovea::server {

enum class Dialect { completions, chat };

struct CompletionPrompt {
  std::vector<int32_t> tokens;
  std::string text;  // with `echo`: the text that it repeats
};

struct CompletionRequest {
  Dialect dialect = Dialect::completions;
  std::string model;  // as the client named it; may be empty
  std::vector<CompletionPrompt> prompts;
  int32_t n = 1, best_of = 1;  // choices per prompt: returned, generated
  SamplingParams sampling;     // parameters of the first choice
  bool has_seed = false;       // without one, each choice gets a seed of its own
  bool drops_output = false;   // max_tokens 0: a token is generated, because the engine must
  bool echo = false;
  bool stream = false, include_usage = false, usage_in_chunks = false;
  // Log-probabilities wanted: -1: none, else with this many of the likeliest tokens.
  int32_t logprobs = -1, prompt_logprobs = -1;
  bool special_tokens = false;  // the text has special tokens, too
  bool token_ids = false;       // return_token_ids
  bool tokens_as_ids = false;   // return_tokens_as_token_ids
  ToolChoice tools;             // in chats
  std::string salt;
  int32_t priority = 0;
  std::vector<std::string> ignored;  // fields that the server does not know

  // Returns one request for each prompt and choice, without callbacks. `seed` is used if the client
  // gave none.
  std::vector<ServiceRequest> requests(uint64_t seed) const;
};

// Throws ApiError naming the field. Tokenizes the prompts, so a long body takes time.
CompletionRequest read_completion(Dialect dialect, std::string_view body, const Engine& engine);

}  // namespace fovea::server
