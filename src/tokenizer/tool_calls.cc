// SPDX-License-Identifier: Apache-2.0
#include "fovea/tool_calls.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "tokenizer/python_calls.h"
#include "tokenizer/tool_values.h"

namespace fovea {
namespace {

using Json = nlohmann::ordered_json;

// Calls stand between two of them.
struct Tags {
  std::string_view open, close;
};
constexpr Tags kTags = {"<tool_call>", "</tool_call>"};
constexpr Tags kLfm2Tags = {"<|tool_call_start|>", "<|tool_call_end|>"};

constexpr Tags tags_of(ToolCallFormat format) {
  return format == ToolCallFormat::lfm2 ? kLfm2Tags : kTags;
}

constexpr std::string_view kMistral = "[TOOL_CALLS]", kArguments = "[ARGS]",
                           kPython = "<|python_tag|>";

// Returns the arguments in one line: an object, or a text that holds one.
std::optional<std::string> arguments_of(const Json& given) {
  if (given.is_object()) return given.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (!given.is_string()) return std::nullopt;
  const std::string text = given;
  if (json_end(text) != text.size()) return std::nullopt;
  const Json inner = Json::parse(text, nullptr, false);
  return inner.is_object() ? std::optional(inner.dump()) : std::nullopt;
}

std::optional<ToolCall> call_of(const Json& json) {
  if (!json.is_object() || !json.contains("name") || !json["name"].is_string()) return std::nullopt;
  ToolCall call{json["name"], "{}"};
  for (const char* key : {"arguments", "parameters"}) {
    if (!json.contains(key)) continue;
    const auto arguments = arguments_of(json[key]);
    if (!arguments) return std::nullopt;
    call.arguments = *arguments;
    break;
  }
  return call;
}

// Returns the calls of an object or of an array of objects, or none if any is not a call.
std::vector<ToolCall> calls_of(std::string_view text) {
  if (json_end(text) != text.size()) return {};
  const Json json = Json::parse(text, nullptr, false);
  std::vector<ToolCall> calls;
  for (const Json& one : json.is_array() ? json : Json::array({json})) {
    const auto call = call_of(one);
    if (!call) return {};
    calls.push_back(*call);
  }
  return calls;
}

}  // namespace

ToolCallFormat tool_call_format(std::string_view chat_template) {
  const auto has = [&](std::string_view part) { return chat_template.find(part) != part.npos; };
  if (has(kTags.open)) {
    if (has("<function=")) return ToolCallFormat::qwen3_coder;
    return has("<arg_key>") ? ToolCallFormat::glm4 : ToolCallFormat::hermes;
  }
  if (has(kMistral) || has("[AVAILABLE_TOOLS]")) return ToolCallFormat::mistral;
  // Neither LFM2's template nor that of LFM2.5, which has no marks around the list, writes calls.
  if (has("<|tool_list_start|>") || has("List of tools: [")) return ToolCallFormat::lfm2;
  if (has("ipython") && has("\"parameters\": ")) return ToolCallFormat::llama3;
  return ToolCallFormat::none;
}

bool ToolCallParser::is_mark(std::string_view special_token) {
  constexpr std::string_view kMarks[] = {
      kTags.open, kTags.close, kLfm2Tags.open, kLfm2Tags.close, kMistral,      kArguments,
      kPython,    "<arg_key>", "</arg_key>",   "<arg_value>",   "</arg_value>"};
  return std::ranges::find(kMarks, special_token) != std::end(kMarks);
}

ToolCallParser::ToolCallParser(ToolCallFormat format, std::string_view tools) : format_(format) {
  if (format == ToolCallFormat::qwen3_coder || format == ToolCallFormat::glm4)
    schemas_ = parameter_schemas(tools);
}

ToolCallParser::Output ToolCallParser::push(std::string_view text) {
  held_ += text;
  Output output;
  read(output, false);
  return output;
}

ToolCallParser::Output ToolCallParser::finish() {
  Output output;
  read(output, true);
  release(held_.size(), output);
  return output;
}

void ToolCallParser::read(Output& output, bool ends) {
  switch (format_) {
    case ToolCallFormat::none:
      return release(held_.size(), output);
    case ToolCallFormat::llama3:
      return read_llama3(output, ends);
    case ToolCallFormat::mistral:
      return read_mistral(output, ends);
    default:
      return read_tagged(output, ends);
  }
}

std::vector<ToolCall> ToolCallParser::tagged_calls(std::string_view text) const {
  if (format_ == ToolCallFormat::hermes) return calls_of(text);
  if (format_ == ToolCallFormat::lfm2) {
    const std::vector<ToolCall> calls = calls_of(text);
    return calls.empty() ? read_python_calls(text) : calls;
  }
  const std::optional<ToolCall> call = format_ == ToolCallFormat::glm4
                                           ? read_glm4_call(text, schemas_)
                                           : read_qwen3_coder_call(text, schemas_);
  return call ? std::vector{*call} : std::vector<ToolCall>();
}

void ToolCallParser::release(size_t bytes, Output& output) {
  const std::string_view text = std::string_view(held_).substr(0, bytes);
  if (!has_calls_ || !trimmed(text).empty()) output.content += text;
  held_.erase(0, bytes);
}

bool ToolCallParser::skip_to_mark(std::string_view mark, Output& output, bool ends) {
  const size_t at = held_.find(mark);
  if (at != held_.npos) {
    // White space before a call belongs to it.
    const size_t text = held_.find_last_not_of(kSpace, at == 0 ? held_.npos : at - 1);
    const size_t content = at == 0 || text == held_.npos ? 0 : text + 1;
    before_ = held_.substr(content, at - content);
    release(content, output);
    held_.erase(0, before_.size() + mark.size());
    return true;
  }
  if (ends) return false;
  size_t keep = std::min(held_.size(), mark.size() - 1);
  while (keep > 0 && !mark.starts_with(std::string_view(held_).substr(held_.size() - keep))) --keep;
  // White space may be that before a call.
  size_t free = held_.size() - keep;
  while (free > 0 && kSpace.find(held_[free - 1]) != kSpace.npos) --free;
  release(free, output);
  return false;
}

void ToolCallParser::read_tagged(Output& output, bool ends) {
  const Tags tags = tags_of(format_);
  while (true) {
    if (!inside_) {
      if (!skip_to_mark(tags.open, output, ends)) return;
      inside_ = true;
    }
    const size_t close = held_.find(tags.close);
    if (close == held_.npos && !ends) return;
    // A model may end its answer without the last mark.
    const std::string_view text = std::string_view(held_).substr(0, close);
    std::vector<ToolCall> calls = tagged_calls(trimmed(text));
    inside_ = false;
    if (calls.empty()) {
      output.content.append(before_).append(tags.open).append(text);
      if (close != held_.npos) output.content += tags.close;
    } else {
      has_calls_ = true;
      output.calls.insert(output.calls.end(), calls.begin(), calls.end());
    }
    held_.erase(0, close == held_.npos ? close : close + tags.close.size());
    if (held_.empty()) return;
  }
}

void ToolCallParser::read_llama3(Output& output, bool ends) {
  while (!is_content_) {
    std::string_view text = trimmed(held_);
    if (text.starts_with(kPython)) text = trimmed(text.substr(kPython.size()));
    if (has_calls_ && text.starts_with(';')) text = trimmed(text.substr(1));
    const bool may_be_mark = kPython.starts_with(text) && !ends;
    if (text.empty() || may_be_mark) return;
    const size_t end = json_end(text);
    if (end == 0 && !ends) return;
    const bool whole = text[0] == '{' && end != 0 && end != text.npos;
    const std::vector<ToolCall> calls =
        whole ? calls_of(text.substr(0, end)) : std::vector<ToolCall>();
    if (calls.empty()) {
      is_content_ = true;
      break;
    }
    has_calls_ = true;
    output.calls.insert(output.calls.end(), calls.begin(), calls.end());
    held_ = std::string(text.substr(end));
  }
  if (is_content_) release(held_.size(), output);
}

void ToolCallParser::read_mistral(Output& output, bool ends) {
  while (true) {
    if (!inside_) {
      if (!skip_to_mark(kMistral, output, ends)) return;
      inside_ = true;
    }
    const std::string_view text = trimmed(held_);
    if (text.empty()) return;
    std::vector<ToolCall> calls;
    size_t end = json_end(text), begin = 0;
    if (text[0] != '[' && text[0] != '{') {
      // name[ARGS]{...}
      begin = text.find('{');
      if (begin == text.npos && !ends) return;
      end = begin == text.npos ? begin : json_end(text.substr(begin));
      if (end != 0 && end != text.npos) end += begin;
    }
    if (end == 0 && !ends) return;
    if (end != 0 && end != text.npos && begin > 0) {
      std::string_view name = trimmed(text.substr(0, begin));
      if (name.ends_with(kArguments)) name.remove_suffix(kArguments.size());
      const Json json = Json::parse(text.substr(begin, end - begin), nullptr, false);
      if (json.is_object() && !name.empty()) calls.push_back({std::string(name), json.dump()});
    } else if (end != 0 && end != text.npos) {
      calls = calls_of(text.substr(0, end));
    }
    inside_ = false;
    if (calls.empty()) {
      output.content.append(before_).append(kMistral).append(held_);
      held_.clear();
      return;
    }
    has_calls_ = true;
    output.calls.insert(output.calls.end(), calls.begin(), calls.end());
    held_ = std::string(text.substr(end));
  }
}

}  // namespace fovea
