// SPDX-License-Identifier: Apache-2.0
#include "server/logprobs.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "tokenizer/utf8.h"

namespace fovea::server {
namespace {

using nlohmann::json;

// JSON has no infinity; vLLM writes this number, too.
constexpr float kImpossible = -9999;

std::string token_text(int32_t token, const LogprobStyle& style) {
  if (style.tokens_as_ids) return fmt::format("token_id:{}", token);
  return replace_broken_utf8(style.engine->token_bytes(token));
}

float finite(float logprob) { return std::max(logprob, kImpossible); }

std::span<const TokenLogprob> likeliest(const ScoredToken& token, const LogprobStyle& style) {
  return std::span(token.top).first(
      std::min(token.top.size(), static_cast<size_t>(std::max(style.top, 0))));
}

int64_t characters(std::string_view text) {
  return std::ranges::count_if(text, [](char c) { return (c & 0xC0) != 0x80; });
}

json chat_entry(int32_t token, float logprob, const LogprobStyle& style) {
  const std::string bytes = style.engine->token_bytes(token);
  json list = json::array();
  for (const char c : bytes) list.push_back(static_cast<uint8_t>(c));
  return {{"token", token_text(token, style)},
          {"logprob", finite(logprob)},
          {"bytes", std::move(list)}};
}

}  // namespace

std::vector<ScoredToken> score_prompt(std::span<const int32_t> tokens, const TokenEvent& last) {
  std::vector<ScoredToken> scored(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    scored[i].token = tokens[i];
    if (i > 0 && i < last.prompt_logprobs.size()) scored[i].logprob = last.prompt_logprobs[i];
    if (i < last.prompt_top.size()) scored[i].top = last.prompt_top[i];
  }
  return scored;
}

json completion_logprobs(std::span<const ScoredToken> tokens, const LogprobStyle& style,
                         int64_t& offset) {
  json texts = json::array(), logprobs = json::array(), tops = json::array();
  json offsets = json::array();
  for (const ScoredToken& token : tokens) {
    std::string text = token_text(token.token, style);
    offsets.push_back(offset);
    offset += characters(text);
    if (token.logprob) {
      // As in OpenAI's API, the token itself is there even if it is not among the likeliest.
      json top = json::object();
      top[text] = finite(*token.logprob);
      for (const TokenLogprob& likely : likeliest(token, style))
        top.emplace(token_text(likely.token, style), finite(likely.logprob));
      tops.push_back(std::move(top));
      logprobs.push_back(finite(*token.logprob));
    } else {
      tops.push_back(nullptr);
      logprobs.push_back(nullptr);
    }
    texts.push_back(std::move(text));
  }
  return {{"tokens", std::move(texts)},
          {"token_logprobs", std::move(logprobs)},
          {"top_logprobs", std::move(tops)},
          {"text_offset", std::move(offsets)}};
}

json chat_logprobs(std::span<const ScoredToken> tokens, const LogprobStyle& style) {
  json content = json::array();
  for (const ScoredToken& token : tokens) {
    json entry = chat_entry(token.token, token.logprob.value_or(0), style);
    json top = json::array();
    for (const TokenLogprob& likely : likeliest(token, style))
      top.push_back(chat_entry(likely.token, likely.logprob, style));
    entry["top_logprobs"] = std::move(top);
    content.push_back(std::move(entry));
  }
  json logprobs = json::object();
  logprobs["content"] = std::move(content);
  return logprobs;
}

json prompt_logprobs(std::span<const ScoredToken> tokens, const LogprobStyle& style) {
  json all = json::array();
  for (const ScoredToken& token : tokens) {
    if (!token.logprob) {
      all.push_back(nullptr);
      continue;
    }
    json entries = json::object();
    const auto add = [&](int32_t id, float logprob, json rank) {
      entries.emplace(std::to_string(id), json{{"logprob", finite(logprob)},
                                               {"rank", std::move(rank)},
                                               {"decoded_token", token_text(id, style)}});
    };
    int rank = 0;
    for (const TokenLogprob& likely : likeliest(token, style))
      add(likely.token, likely.logprob, ++rank);
    add(token.token, *token.logprob, nullptr);
    all.push_back(std::move(entries));
  }
  return all;
}

}  // namespace fovea::server
