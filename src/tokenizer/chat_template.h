// SPDX-License-Identifier: Apache-2.0
// The chat template of a checkpoint, and the conversations that it writes.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "fovea/engine.h"
#include "tokenizer/chat_template/template.h"
#include "tokenizer/chat_template/value.h"

namespace fovea {

class ChatTemplate {
 public:
  // Reads chat_template.jinja, or else the chat_template of tokenizer_config.json; if that is a
  // list, "default" and, for conversations with tools, "tool_use". Never throws for a missing or
  // damaged template; render() reports the reason.
  static ChatTemplate open(const std::string& folder);
  // `tokens` has the texts of special tokens by the names that templates use ("bos_token"). Errors
  // call the template `name`.
  static ChatTemplate parse(std::string_view source, jinja::Dict tokens, std::string_view name);

  // Returns the text of the conversation. Throws Error{unsupported} if there is no template or it
  // cannot be parsed, Error{invalid_argument} if the template refuses the conversation.
  std::string render(const Conversation& conversation) const;
  // Returns the text of a system message and a user's, up to the beginning of the answer.
  std::string render(const ChatPrompt& prompt) const;
  ToolCallFormat tool_call_format() const { return tool_call_format_; }

 private:
  std::string render(const jinja::Value& messages, const jinja::Value& tools, jinja::Dict variables,
                     bool continues) const;

  std::optional<jinja::Template> template_, with_tools_;
  bool reads_parts_ = false;
  ToolCallFormat tool_call_format_ = ToolCallFormat::none;
  jinja::Dict tokens_;
  std::string refusal_;  // set if there is no template
};

}  // namespace fovea
