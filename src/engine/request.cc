// SPDX-License-Identifier: Apache-2.0
#include "engine/request.h"

#include "core/check.h"
#include "tokenizer/utf8.h"

namespace fovea {
namespace {

constexpr float kMaxTemperature = 100;
constexpr int32_t kMaxLogprobs = 20;  // bounds the size of what the engine returns
constexpr size_t kMaxStopStrings = 64;
constexpr size_t kMaxStopBytes = 1024;
constexpr size_t kMaxStopTokens = 1024;
constexpr size_t kMaxBiases = 1024;
constexpr float kMaxBias = 100;
constexpr float kMaxPenalty = 2;
constexpr float kMinRepetition = 0.01f, kMaxRepetition = 100;

bool is_utf8(const std::string& text) {
  Utf8Stream stream;
  std::string whole = stream.push(text);
  whole += stream.finish();
  return whole == text;
}

void check_stops(const SamplingParams& params, int32_t vocabulary) {
  check_argument(params.stop.size() <= kMaxStopStrings, "stop has {} strings, at most {}",
                 params.stop.size(), kMaxStopStrings);
  for (const std::string& stop : params.stop) {
    check_argument(!stop.empty() && stop.size() <= kMaxStopBytes,
                   "a stop string has {} bytes, must have 1 to {}", stop.size(), kMaxStopBytes);
    check_argument(is_utf8(stop), "a stop string of {} bytes is not UTF-8", stop.size());
  }
  check_argument(params.stop_tokens.size() <= kMaxStopTokens, "stop_tokens has {} ids, at most {}",
                 params.stop_tokens.size(), kMaxStopTokens);
  for (const int32_t token : params.stop_tokens) {
    check_argument(token >= 0 && token < vocabulary, "stop_tokens contains {}, must be in [0, {})",
                   token, vocabulary);
  }
}

void check_within(const char* name, float value, float low, float high) {
  check_argument(value >= low && value <= high, "{} is {}, must be in [{}, {}]", name, value, low,
                 high);
}

void check_logit_changes(const SamplingParams& params, int32_t vocabulary) {
  check_argument(params.logit_bias.size() <= kMaxBiases, "logit_bias has {} tokens, at most {}",
                 params.logit_bias.size(), kMaxBiases);
  for (const auto& [token, bias] : params.logit_bias) {
    check_argument(token >= 0 && token < vocabulary,
                   "logit_bias contains token {}, must be in [0, {})", token, vocabulary);
    check_within("a bias of logit_bias", bias, -kMaxBias, kMaxBias);
  }
  check_within("repetition_penalty", params.repetition_penalty, kMinRepetition, kMaxRepetition);
  check_within("frequency_penalty", params.frequency_penalty, -kMaxPenalty, kMaxPenalty);
  check_within("presence_penalty", params.presence_penalty, -kMaxPenalty, kMaxPenalty);
  check_argument(params.min_tokens >= 0 && params.min_tokens <= params.max_new_tokens,
                 "min_tokens is {}, must be in [0, {}], the max_new_tokens", params.min_tokens,
                 params.max_new_tokens);
}

}  // namespace

// NaN fails every comparison, so each check states the condition that must hold.
void check_sampling_params(const SamplingParams& params, int32_t vocabulary) {
  check_argument(params.max_new_tokens >= 1, "max_new_tokens is {}, must be at least 1",
                 params.max_new_tokens);
  check_argument(params.temperature >= 0 && params.temperature <= kMaxTemperature,
                 "temperature is {}, must be in [0, {}]", params.temperature, kMaxTemperature);
  check_argument(params.top_k >= 0, "top_k is {}, must be at least 0 (off)", params.top_k);
  check_argument(params.top_p > 0 && params.top_p <= 1, "top_p is {}, must be in (0, 1]",
                 params.top_p);
  check_argument(params.min_p >= 0 && params.min_p <= 1, "min_p is {}, must be in [0, 1]",
                 params.min_p);
  check_argument(params.logprobs >= -1 && params.logprobs <= kMaxLogprobs,
                 "logprobs is {}, must be -1 (off) or in [0, {}]", params.logprobs, kMaxLogprobs);
  check_logit_changes(params, vocabulary);
  check_stops(params, vocabulary);
}

void check_tokens(std::span<const int32_t> tokens, int32_t vocabulary) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    check_argument(tokens[i] >= 0 && tokens[i] < vocabulary, "token {} is {}, must be in [0, {})",
                   i, tokens[i], vocabulary);
  }
}

void check_prompt(std::span<const int32_t> tokens, const RequestLimits& limits) {
  check_argument(!tokens.empty(), "the prompt has 0 tokens, must have at least 1");
  if (tokens.size() >= static_cast<size_t>(limits.max_context)) {
    std::string text =
        fmt::format("the prompt has {} tokens; with one new token it must fit the context of {}",
                    tokens.size(), limits.max_context);
    if (limits.max_context < limits.wanted_context) {
      text += fmt::format(", which is all that the KV budget holds of {}", limits.wanted_context);
    }
    fail(ErrorCode::invalid_argument, "{}", text);
  }
  check_tokens(tokens, limits.vocabulary);
}

}  // namespace fovea
