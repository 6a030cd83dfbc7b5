// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/chat_template.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "core/check.h"
#include "core/mapped_file.h"
#include "model/json.h"
#include "tokenizer/chat_template/python_text.h"
#include "tokenizer/chat_template/read_json.h"
#include "tokenizer/conversation.h"
#include "tokenizer/utf8.h"

namespace fovea {
namespace {

using jinja::Dict;
using jinja::List;
using jinja::Value;

constexpr JsonLimits kConfigLimits = {.bytes = 64'000'000, .depth = 32};
// Templates know these by name, as well as the extra_special_tokens of a checkpoint.
constexpr const char* kTokens[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                   "pad_token", "cls_token", "mask_token"};
// A conversation has fields of its own for these.
constexpr const char* kReserved[] = {"messages", "tools", "add_generation_prompt"};
constexpr std::string_view kMark = "CONTINUE_FINAL_MESSAGE_TAG ";

// Returns the text of {"content": "<s>"} or "<s>"; anything else is no token.
std::string token_text(const nlohmann::json& config, const char* key) {
  const auto found = config.find(key);
  if (found == config.end()) return {};
  if (found->is_string()) return found->get<std::string>();
  return found->is_object() ? token_text(*found, "content") : std::string();
}

Dict tokens_of(const nlohmann::json& config) {
  Dict tokens;
  for (const char* name : kTokens) {
    if (std::string text = token_text(config, name); !text.empty()) tokens.set(name, text);
  }
  const auto extra = config.find("extra_special_tokens");
  if (extra == config.end() || !extra->is_object()) return tokens;
  for (const auto& [name, unused] : extra->items()) {
    if (std::string text = token_text(*extra, name.c_str()); !text.empty()) tokens.set(name, text);
  }
  return tokens;
}

// Returns a template of a list by its name, or the only one if `name` is "default".
std::string template_of(const nlohmann::json& config, std::string_view name) {
  const auto found = config.find("chat_template");
  if (found == config.end()) return {};
  if (found->is_string()) return name == "default" ? found->get<std::string>() : std::string();
  if (!found->is_array()) return {};
  for (const nlohmann::json& named : *found) {
    if (named.is_object() && token_text(named, "name") == name)
      return token_text(named, "template");
  }
  return {};
}

// Returns the messages with the mark at the end of the last one.
Value marked(const Value& messages, std::string& last_text) {
  List items = messages.items() ? *messages.items() : List{};
  const Dict* last = items.empty() ? nullptr : items.back().dict();
  const Value* content = last ? last->find_text("content") : nullptr;
  check_argument(content != nullptr && content->text() != nullptr,
                 "messages: the last one has no text to continue");
  last_text = *content->text();
  Dict copy = *last;
  copy.set("content", last_text + std::string(kMark));
  items.back() = std::move(copy);
  return items;
}

}  // namespace

ChatTemplate ChatTemplate::open(const std::string& folder) {
  namespace fs = std::filesystem;
  const std::string own = (fs::path(folder) / "chat_template.jinja").string();
  const std::string config_path = (fs::path(folder) / "tokenizer_config.json").string();
  ChatTemplate result;
  try {
    std::error_code ignored;
    std::string source, tool_source;
    Dict tokens;
    if (fs::exists(config_path, ignored)) {
      const MappedFile file(config_path);
      const auto config = parse_json(file.text(), config_path, kConfigLimits);
      if (config->is_object()) {
        tokens = tokens_of(*config);
        source = template_of(*config, "default");
        tool_source = template_of(*config, "tool_use");
      }
    }
    if (fs::exists(own, ignored)) return parse(MappedFile(own).text(), tokens, own);
    if (!source.empty()) {
      result = parse(source, tokens, config_path);
      if (tool_source.empty()) return result;
      result.with_tools_ = jinja::Template::parse(tool_source, config_path + ", tool_use");
      result.tool_call_format_ = fovea::tool_call_format(tool_source);
      return result;
    }
    result.refusal_ = fmt::format("{}: has no chat template", folder);
  } catch (const Error& error) {
    result.refusal_ = error.what();
  }
  return result;
}

ChatTemplate ChatTemplate::parse(std::string_view source, Dict tokens, std::string_view name) {
  ChatTemplate result;
  result.tokens_ = std::move(tokens);
  try {
    result.template_ = jinja::Template::parse(source, name);
    result.reads_parts_ = reads_content_parts(source);
    result.tool_call_format_ = fovea::tool_call_format(source);
  } catch (const Error& error) {
    result.refusal_ = error.what();
  }
  return result;
}

std::string ChatTemplate::render(const Conversation& conversation) const {
  check_argument(!(conversation.add_generation_prompt && conversation.continue_last_message),
                 "add_generation_prompt and continue_last_message exclude each other");
  Dict variables;
  if (!conversation.variables.empty()) {
    const Value given = jinja::read_json(conversation.variables, "variables");
    check_argument(given.dict() != nullptr, "variables is a {}, must be an object",
                   given.type_name());
    variables = *given.dict();
    for (const char* name : kReserved) {
      check_argument(variables.find_text(name) == nullptr,
                     "variables has '{}', which is a field of the conversation", name);
    }
  }
  variables.set("add_generation_prompt", conversation.add_generation_prompt);
  const Value messages =
      template_messages(jinja::read_json(conversation.messages, "messages"), reads_parts_);
  const Value tools = conversation.tools.empty()
                          ? Value()
                          : template_tools(jinja::read_json(conversation.tools, "tools"));
  return render(messages, tools, std::move(variables), conversation.continue_last_message);
}

std::string ChatTemplate::render(const ChatPrompt& prompt) const {
  const auto message = [](const char* role, const std::string& text) {
    check_argument(replace_broken_utf8(text) == text, "the {} message is not UTF-8", role);
    Dict dict;
    dict.set("role", role);
    dict.set("content", text);
    return Value(dict);
  };
  List messages;
  if (prompt.system) messages.push_back(message("system", *prompt.system));
  messages.push_back(message("user", prompt.user));
  Dict variables;
  variables.set("add_generation_prompt", true);
  return render(messages, {}, std::move(variables), false);
}

std::string ChatTemplate::render(const Value& messages, const Value& tools, Dict variables,
                                 bool continues) const {
  if (!template_) fail(ErrorCode::unsupported, "{}", refusal_);
  for (const auto& [name, text] : tokens_.entries())
    if (variables.find(name) == nullptr) variables.set(name, text);
  if (variables.find_text("documents") == nullptr) variables.set("documents", {});
  variables.set("tools", tools);
  const jinja::Template& chosen = with_tools_ && !tools.is_none() ? *with_tools_ : *template_;
  if (!continues) {
    variables.set("messages", messages);
    return chosen.render(variables);
  }
  // Cuts the text behind the last message, whose trailing spaces the template may remove.
  std::string last;
  variables.set("messages", marked(messages, last));
  std::string text = chosen.render(variables);
  const std::string_view tag = jinja::strip(kMark);
  const size_t at = text.rfind(tag);
  check_argument(at != text.npos && text.find(jinja::strip(last)) != text.npos,
                 "continue_last_message: the template does not write the last message as it is");
  if (std::string_view(text).substr(at).starts_with(kMark)) return text.substr(0, at);
  return std::string(jinja::strip(std::string_view(text).substr(0, at), jinja::Side::right));
}

}  // namespace fovea
