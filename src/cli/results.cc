// SPDX-License-Identifier: Apache-2.0
#include "cli/results.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "cli/commands.h"

namespace fovea::cli {
namespace {

const char* finish_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::none:
      return "none";
    case FinishReason::stop:
      return "stop";
    case FinishReason::length:
      return "length";
    case FinishReason::cancelled:
      return "cancelled";
    case FinishReason::failed:
      return "failed";
  }
  return "?";
}

nlohmann::ordered_json to_json(const GenerateResult& result) {
  nlohmann::ordered_json json{{"text", result.text},
                              {"tokens", result.tokens},
                              {"finish_reason", finish_name(result.finish)}};
  if (result.finish == FinishReason::failed) json["error"] = result.error;
  json["prompt_tokens"] = result.prompt_tokens;
  json["cached_tokens"] = result.cached_tokens;
  if (!result.logprobs.empty()) json["logprobs"] = result.logprobs;
  if (!result.top.empty()) {
    json["top_logprobs"] = nlohmann::ordered_json::array();
    for (const std::vector<TokenLogprob>& alternatives : result.top) {
      nlohmann::ordered_json row = nlohmann::ordered_json::array();
      for (const TokenLogprob& top : alternatives) {
        row.push_back({{"token", top.token}, {"logprob", top.logprob}});
      }
      json["top_logprobs"].push_back(std::move(row));
    }
  }
  if (!result.prompt_logprobs.empty()) json["prompt_logprobs"] = result.prompt_logprobs;
  return json;
}

}  // namespace

ResultPrinter::ResultPrinter(std::span<const GenerateRequest> requests,
                             std::vector<std::string> shown, ResultFormat format, bool has_text)
    : requests_(requests),
      shown_(std::move(shown)),
      format_(format),
      has_text_(has_text),
      results_(requests.size()) {}

void ResultPrinter::add(const TokenEvent& event) {
  const auto index = static_cast<size_t>(event.request - 1);
  append_event(results_.at(index), event, requests_[index].sampling.logprobs >= 0);
  has_events_ = is_printing_ = true;
  if (format_ == ResultFormat::stream) {
    if (has_text_) {
      fmt::print("{}{}", started_ ? "" : shown_[index], event.text);
    } else if (event.token >= 0) {
      fmt::print("{}{}", started_ ? "," : "", event.token);
    }
    started_ = true;
    flush_stdout();
  }
  print_complete();
  is_printing_ = false;
}

void ResultPrinter::fail_rest(const Engine& engine, const std::string& why) {
  if (is_printing_ || !has_events_) return;
  for (size_t i = next_; i < results_.size(); ++i) {
    GenerateResult& result = results_[i];
    if (result.finish != FinishReason::none) continue;
    result.finish = FinishReason::failed;
    result.error = why;
    const GenerateRequest& request = requests_[i];
    result.prompt_tokens = static_cast<int32_t>(
        request.tokens.empty() ? engine.encode(request.prompt).size() : request.tokens.size());
  }
  print_complete();
}

void ResultPrinter::print_complete() {
  const size_t before = next_;
  while (next_ < results_.size() && results_[next_].finish != FinishReason::none) print(next_++);
  if (next_ > before) flush_stdout();
}

void ResultPrinter::print(size_t index) {
  const GenerateResult& result = results_[index];
  switch (format_) {
    case ResultFormat::stream:
      fmt::print("\n");
      break;
    case ResultFormat::lines:
      fmt::print("[{}] {}{}\n", index, shown_[index],
                 has_text_ ? result.text : fmt::format("{}", fmt::join(result.tokens, ",")));
      break;
    case ResultFormat::json:
      fmt::print("{}\n", to_json(result).dump());
      break;
  }
  if (result.finish == FinishReason::failed) {
    failures_.push_back(
        fmt::format("prompt {} of {}: {}", index + 1, results_.size(), result.error));
  }
}

}  // namespace fovea::cli
