// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/conversation.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/check.h"
#include "core/quote.h"
#include "tokenizer/chat_template/lexer.h"
#include "tokenizer/chat_template/read_json.h"

namespace fovea {
namespace {

using jinja::Dict;
using jinja::List;
using jinja::Token;
using jinja::TokenKind;
using jinja::Value;

constexpr size_t kMaxMessages = 10'000;

Value content_of(const Value& content, const std::string& place, bool keeps_parts) {
  if (content.is_none() || content.text()) return content;
  check_argument(content.is_list(), "{} is a {}, must be a text or a list of parts", place,
                 content.type_name());
  std::string text;
  const List& parts = *content.items();
  for (size_t i = 0; i < parts.size(); ++i) {
    const Value* kind = parts[i].dict() ? parts[i].dict()->find_text("type") : nullptr;
    const Value* part = parts[i].dict() ? parts[i].dict()->find_text("text") : nullptr;
    check_argument(kind != nullptr && kind->text() != nullptr, "{}[{}] has no type", place, i);
    check_argument(*kind->text() == "text", "{}[{}] is of type {}; only text is supported", place,
                   i, quote(*kind->text()));
    check_argument(part != nullptr && part->text() != nullptr, "{}[{}] has no text", place, i);
    if (i > 0) text += '\n';
    text += *part->text();
  }
  return keeps_parts ? content : Value(std::move(text));
}

// Returns the call with its arguments, JSON in a text, as an object.
Value call_of(const Value& call, const std::string& place) {
  const Value* function = call.dict() ? call.dict()->find_text("function") : nullptr;
  check_argument(function != nullptr && function->dict() != nullptr, "{} has no function", place);
  const Value* name = function->dict()->find_text("name");
  check_argument(name != nullptr && name->text() != nullptr, "{}.function has no name", place);
  const Value* arguments = function->dict()->find_text("arguments");
  if (arguments == nullptr || arguments->text() == nullptr) return call;
  Value object = arguments->text()->empty()
                     ? Value(Dict())
                     : jinja::read_json(*arguments->text(), place + ".function.arguments");
  check_argument(object.dict() != nullptr, "{}.function.arguments is a {}, must be an object",
                 place, object.type_name());
  Dict changed = *function->dict(), result = *call.dict();
  changed.set("arguments", std::move(object));
  result.set("function", std::move(changed));
  return result;
}

Value message_of(const Value& message, const std::string& place, bool keeps_parts) {
  const Dict* given = message.dict();
  check_argument(given != nullptr, "{} is a {}, must be an object", place, message.type_name());
  const Value* role = given->find_text("role");
  check_argument(role != nullptr && role->text() != nullptr, "{} has no role", place);
  const Value* content = given->find_text("content");
  const Value* calls = given->find_text("tool_calls");
  const bool has_calls = calls != nullptr && !calls->is_none();
  check_argument(content != nullptr || has_calls, "{} has no content", place);
  Dict result;
  for (const auto& [key, value] : given->entries()) {
    // Templates take the mere presence of the key for calls.
    if (!equal(key, "tool_calls") || has_calls) result.set(key, value);
  }
  result.set("content", content ? content_of(*content, place + ".content", keeps_parts) : Value());
  if (!has_calls) return result;
  check_argument(calls->is_list(), "{}.tool_calls is a {}, must be a list", place,
                 calls->type_name());
  List changed;
  for (size_t i = 0; i < calls->items()->size(); ++i)
    changed.push_back(call_of((*calls->items())[i], fmt::format("{}.tool_calls[{}]", place, i)));
  result.set("tool_calls", std::move(changed));
  return result;
}

}  // namespace

bool reads_content_parts(std::string_view source) {
  const std::vector<Token> tokens = jinja::tokenize(source);
  bool loop = false;
  for (size_t i = 1; i < tokens.size(); ++i) {
    const Token& before = tokens[i - 1];
    if (before.kind == TokenKind::block_begin) loop = tokens[i].text == "for";
    // The end of "for part in message['content']".
    if (loop && (tokens[i].kind == TokenKind::block_end || tokens[i].text == "if")) {
      const Token& last = before.text == "]" && i > 1 ? tokens[i - 2] : before;
      if (last.text == "content") return true;
      loop = false;
    }
  }
  return false;
}

Value template_messages(const Value& messages, bool keeps_parts) {
  check_argument(messages.is_list(), "messages is a {}, must be a list", messages.type_name());
  const List& given = *messages.items();
  check_argument(!given.empty() && given.size() <= kMaxMessages,
                 "messages has {} entries, must have 1 to {}", given.size(), kMaxMessages);
  List result;
  for (size_t i = 0; i < given.size(); ++i)
    result.push_back(message_of(given[i], fmt::format("messages[{}]", i), keeps_parts));
  return result;
}

Value template_tools(const Value& tools) {
  check_argument(tools.is_list(), "tools is a {}, must be a list", tools.type_name());
  const List& given = *tools.items();
  for (size_t i = 0; i < given.size(); ++i) {
    const Value* function = given[i].dict() ? given[i].dict()->find_text("function") : nullptr;
    check_argument(function != nullptr && function->dict() != nullptr, "tools[{}] has no function",
                   i);
    const Value* name = function->dict()->find_text("name");
    check_argument(name != nullptr && name->text() != nullptr, "tools[{}].function has no name", i);
  }
  return given.empty() ? Value() : tools;
}

}  // namespace fovea
