// SPDX-License-Identifier: Apache-2.0
#include "server/tool_output.h"

#include <utility>

#include "server/json_text.h"

namespace fovea::server {
namespace {

using Ordered = nlohmann::ordered_json;

// Returns the calls of [{"name": ..., "arguments": ...}, ...], or none if the text was cut.
std::vector<ToolCall> calls_of(const std::string& text) {
  const Ordered list = Ordered::parse(text, nullptr, false);
  std::vector<ToolCall> calls;
  if (!list.is_array()) return calls;
  for (const Ordered& call : list) {
    if (!call.is_object() || !call.contains("name") || !call.contains("arguments")) return {};
    calls.push_back({call.at("name").get<std::string>(), json_text(call.at("arguments"))});
  }
  return calls;
}

}  // namespace

std::string special_text(const Engine& engine, int32_t token) {
  if (token < 0 || !engine.decode({&token, 1}).empty()) return {};
  std::string text = engine.token_bytes(token);
  // Some tokenizers drop a space at the beginning of a text.
  return text.find_first_not_of(' ') == text.npos ? std::string() : text;
}

ToolOutput::Parts ToolOutput::add(const TokenEvent& event) {
  switch (choice_.use) {
    case ToolUse::automatic:
      return read_calls(event);
    case ToolUse::required:
      return read_list(event);
    case ToolUse::function:
      return read_arguments(event);
    default:
      return {.content = event.text};
  }
}

ToolOutput::Parts ToolOutput::read_calls(const TokenEvent& event) {
  Parts parts;
  append(parser_.push(event.text), parts);
  const std::string special = special_text(engine_, event.token);
  if (ToolCallParser::is_mark(special)) append(parser_.push(special), parts);
  if (event.finish != FinishReason::none) append(parser_.finish(), parts);
  return parts;
}

void ToolOutput::append(ToolCallParser::Output output, Parts& parts) {
  parts.content += output.content;
  for (ToolCall& call : output.calls) {
    if (calls_ > 0 && !choice_.several) return;
    parts.calls.push_back({calls_++, std::move(call.name), std::move(call.arguments)});
  }
}

ToolOutput::Parts ToolOutput::read_list(const TokenEvent& event) {
  list_ += event.text;
  Parts parts;
  if (event.finish == FinishReason::none) return parts;
  append({.content = {}, .calls = calls_of(list_)}, parts);
  // A list without its end has no calls: clients see what there is.
  if (parts.calls.empty()) parts.content = std::move(list_);
  return parts;
}

ToolOutput::Parts ToolOutput::read_arguments(const TokenEvent& event) {
  Parts parts;
  const bool first = calls_ == 0;
  if (!first && event.text.empty()) return parts;
  calls_ = 1;
  CallPart& part = parts.calls.emplace_back(CallPart{.index = 0, .arguments = event.text});
  if (first) part.name = choice_.function;
  return parts;
}

}  // namespace fovea::server
