// SPDX-License-Identifier: Apache-2.0
// The chat formats of checkpoints: the text around a user's message that makes a model answer.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "fovea/engine.h"

namespace fovea {

// Recognises a Jinja template as one of these formats by its text, without executing it: ChatML,
// Llama 3, Mistral ("[INST]") and Gemma. Refuses templates that may produce anything else.
class ChatFormat {
 public:
  // Reads chat_template.jinja, or else the chat_template of tokenizer_config.json. Never throws for
  // a missing, damaged or unknown template; render() reports the reason.
  static ChatFormat open(const std::string& folder);
  // `bos` is the text of the begin-of-sequence token, or empty. Errors call the template `name`.
  static ChatFormat parse(std::string_view source, std::string_view bos, std::string_view name);

  // Returns the prompt up to the beginning of the answer, including the special tokens that the
  // template writes. Throws Error{unsupported} if the template was not recognised, and
  // Error{invalid_argument} if it does not support a system message.
  std::string render(const ChatPrompt& prompt) const;

 private:
  enum class SystemPlace { none, own_turn, user_turn };

  void read_chatml(std::string_view source);
  void read_llama3(std::string_view source);
  void read_mistral(std::string_view source);
  void read_gemma(std::string_view source);

  std::string name_;     // name of the format
  std::string refusal_;  // reason why there is no format; otherwise empty
  std::string bos_;      // empty if the template writes none
  SystemPlace system_place_ = SystemPlace::none;
  std::optional<std::string> default_system_;
  std::string before_system_, after_system_;
  std::string before_user_, after_user_;  // the latter includes the beginning of the answer
  bool trims_system_ = false, trims_user_ = false;
};

}  // namespace fovea
