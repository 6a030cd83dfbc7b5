// SPDX-License-Identifier: Apache-2.0
// The chat formats of checkpoints: what is written around a user's message so that a model answers
// it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "fovea/engine.h"

namespace fovea {

// A template of Jinja is recognised as one of the formats below by its text, not executed: ChatML,
// Llama 3, Mistral ("[INST]") and Gemma. A template that may write something else is refused.
class ChatFormat {
 public:
  // Reads chat_template.jinja, else the chat_template of tokenizer_config.json. Throws nothing for
  // a missing, damaged or unknown one: render() then says why.
  static ChatFormat open(const std::string& folder);
  // `bos`: the text of the begin-of-sequence token, empty where there is none. `name` stands for
  // the template in errors.
  static ChatFormat parse(std::string_view source, std::string_view bos, std::string_view name);

  // The text of the prompt up to where the answer begins, with every special token that the
  // template writes. Error{unsupported} where the template is not recognised,
  // Error{invalid_argument} where it has no place for a system message.
  std::string render(const ChatPrompt& prompt) const;

 private:
  enum class SystemPlace { none, own_turn, user_turn };

  void read_chatml(std::string_view source);
  void read_llama3(std::string_view source);
  void read_mistral(std::string_view source);
  void read_gemma(std::string_view source);

  std::string name_;     // of the format
  std::string refusal_;  // why there is no format; empty: there is one
  std::string bos_;      // empty: the template writes none
  SystemPlace system_place_ = SystemPlace::none;
  std::optional<std::string> default_system_;
  std::string before_system_, after_system_;
  std::string before_user_, after_user_;  // the latter includes the beginning of the answer
  bool trims_system_ = false, trims_user_ = false;
};

}  // namespace fovea
