// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/chat_format.h"

#include <fmt/chrono.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>

#include "core/check.h"
#include "core/mapped_file.h"
#include "model/json.h"

namespace fovea {
namespace {

constexpr JsonLimits kConfigLimits = {.bytes = 64'000'000, .depth = 32};
constexpr size_t kMaxTemplateBytes = 1'000'000;

// Common formats that are not supported, and text that only their templates contain. Some of them
// contain ChatML's marks, so they are checked first.
struct OtherFormat {
  std::string_view mark, name;
};
constexpr OtherFormat kOthers[] = {
    {"<<SYS>>", "Llama 2's"},
    {"<|header_start|>", "Llama 4's"},
    {"[SYSTEM_PROMPT]", "Mistral's with [SYSTEM_PROMPT]"},
    {"<|im_sep|>", "Phi-4's"},
    {"<|channel|>", "gpt-oss's"},
    {"[gMASK]", "GLM-4's"},
    {"<|START_OF_TURN_TOKEN|>", "Command R's"},
    {"<|start_of_role|>", "Granite's"},
    {"<\xEF\xBD\x9C"
     "Assistant\xEF\xBD\x9C>",
     "DeepSeek's"},
    {"<|assistant|>", "that of <|assistant|>, as Phi-3 has it"},
    {"### Instruction:", "Alpaca's"},
};

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

bool contains_any(std::string_view text, std::initializer_list<std::string_view> parts) {
  return std::ranges::any_of(parts, [&](std::string_view part) { return contains(text, part); });
}

// Turns escaped line ends in Jinja strings into line ends.
std::string with_line_ends(std::string_view source) {
  std::string text;
  for (size_t i = 0; i < source.size(); ++i) {
    const bool escaped = source.substr(i).starts_with("\\n");
    text += escaped ? '\n' : source[i];
    i += escaped;
  }
  return text;
}

// Returns the text between two marks in the same Jinja string, or nullopt.
std::optional<std::string> text_between(std::string_view source, std::string_view begin,
                                        std::string_view end) {
  for (size_t at = source.find(begin); at != source.npos; at = source.find(begin, at + 1)) {
    const size_t first = at + begin.size();
    const size_t last = source.find(end, first);
    if (last == source.npos) return std::nullopt;
    const std::string_view text = source.substr(first, last - first);
    if (text.find_first_of("'\"{}\\") == text.npos) return std::string(text);
  }
  return std::nullopt;
}

// Returns true if the template may contain its own system message. The sentence about functions
// belongs to tool calls.
bool addresses_model(std::string_view source) {
  if (contains_any(source, {"!= 'system'", "!= \"system\""})) return true;
  for (size_t at = source.find("You are "); at != source.npos; at = source.find("You are ", at + 1))
    if (!source.substr(at).starts_with("You are provided with function")) return true;
  return false;
}

// The Jinja string that contains the first `mark`.
struct Literal {
  size_t begin = 0, end = 0;  // without the quotes
};
std::optional<Literal> literal_around(std::string_view source, std::string_view mark) {
  const size_t at = source.find(mark);
  if (at == source.npos || at == 0) return std::nullopt;
  const size_t open = source.find_last_of("'\"", at);
  if (open == source.npos) return std::nullopt;
  const size_t close = source.find(source[open], at);
  if (close == source.npos) return std::nullopt;
  return Literal{open + 1, close};
}

// Removes white space as Python's str.strip() does, which Jinja's trim calls.
std::string_view trimmed(std::string_view text) {
  constexpr std::array<std::string_view, 29> kSpaces = {" ",
                                                        "\t",
                                                        "\n",
                                                        "\v",
                                                        "\f",
                                                        "\r",
                                                        "\x1C",
                                                        "\x1D",
                                                        "\x1E",
                                                        "\x1F",
                                                        "\xC2\x85",
                                                        "\xC2\xA0",
                                                        "\xE1\x9A\x80",
                                                        "\xE2\x80\x80",
                                                        "\xE2\x80\x81",
                                                        "\xE2\x80\x82",
                                                        "\xE2\x80\x83",
                                                        "\xE2\x80\x84",
                                                        "\xE2\x80\x85",
                                                        "\xE2\x80\x86",
                                                        "\xE2\x80\x87",
                                                        "\xE2\x80\x88",
                                                        "\xE2\x80\x89",
                                                        "\xE2\x80\x8A",
                                                        "\xE2\x80\xA8",
                                                        "\xE2\x80\xA9",
                                                        "\xE2\x80\xAF",
                                                        "\xE2\x81\x9F",
                                                        "\xE3\x80\x80"};
  const auto front = [&] {
    return std::ranges::find_if(kSpaces, [&](auto space) { return text.starts_with(space); });
  };
  const auto back = [&] {
    return std::ranges::find_if(kSpaces, [&](auto space) { return text.ends_with(space); });
  };
  for (auto space = front(); space != kSpaces.end(); space = front())
    text.remove_prefix(space->size());
  for (auto space = back(); space != kSpaces.end(); space = back())
    text.remove_suffix(space->size());
  return text;
}

std::string today() {
  return fmt::format(
      "{:%d %b %Y}",
      fmt::localtime(std::chrono::system_clock::to_time_t(std::chrono::system_clock::now())));
}

// Returns the text of {"content": "<s>"} or "<s>"; anything else is no token.
std::string token_text(const nlohmann::json& config, const char* key) {
  const auto found = config.find(key);
  if (found == config.end()) return {};
  if (found->is_string()) return found->get<std::string>();
  return found->is_object() ? token_text(*found, "content") : std::string();
}

// Returns the chat template from a list of templates.
std::string template_of(const nlohmann::json& config) {
  const auto found = config.find("chat_template");
  if (found == config.end()) return {};
  if (found->is_string()) return found->get<std::string>();
  if (!found->is_array()) return {};
  for (const nlohmann::json& named : *found) {
    if (named.is_object() && token_text(named, "name") == "default")
      return token_text(named, "template");
  }
  return {};
}

}  // namespace

ChatFormat ChatFormat::open(const std::string& folder) {
  namespace fs = std::filesystem;
  const std::string own = (fs::path(folder) / "chat_template.jinja").string();
  const std::string config_path = (fs::path(folder) / "tokenizer_config.json").string();
  try {
    std::error_code ignored;
    std::string bos, found;
    if (fs::exists(config_path, ignored)) {
      const MappedFile file(config_path);
      const auto config = parse_json(file.text(), config_path, kConfigLimits);
      if (config->is_object()) {
        bos = token_text(*config, "bos_token");
        found = template_of(*config);
      }
    }
    if (fs::exists(own, ignored)) return parse(MappedFile(own).text(), bos, own);
    if (!found.empty()) return parse(found, bos, config_path);
    ChatFormat none;
    none.refusal_ = fmt::format("{}: has no chat template", folder);
    return none;
  } catch (const Error& error) {
    ChatFormat none;
    none.refusal_ = error.what();
    return none;
  }
}

ChatFormat ChatFormat::parse(std::string_view given, std::string_view bos, std::string_view name) {
  ChatFormat format;
  const std::string source = with_line_ends(given);
  const auto other = std::ranges::find_if(
      kOthers, [&](const OtherFormat& known) { return contains(source, known.mark); });
  if (source.size() > kMaxTemplateBytes) {
    format.refusal_ =
        fmt::format("the template has {} bytes, the limit is {}", given.size(), kMaxTemplateBytes);
  } else if (other != std::end(kOthers)) {
    format.refusal_ = fmt::format("the format is {}", other->name);
  } else if (contains(source, "<|im_start|>")) {
    format.read_chatml(source);
  } else if (contains(source, "<|start_header_id|>")) {
    format.read_llama3(source);
  } else if (contains(source, "[INST]")) {
    format.read_mistral(source);
  } else if (contains(source, "<start_of_turn>")) {
    format.read_gemma(source);
  } else {
    format.refusal_ = "the template is of no known format";
  }
  if (format.refusal_.empty() && contains(source, "bos_token")) {
    format.bos_ = bos;
    if (bos.empty())
      format.refusal_ = "the template begins with a token, but the checkpoint names no bos_token";
  }
  if (!format.refusal_.empty()) {
    format.refusal_ = fmt::format(
        "{}: {}; known: ChatML, Llama 3, Mistral ([INST]) and Gemma. A raw prompt can hold the "
        "special tokens of any format",
        name, format.refusal_);
  }
  return format;
}

void ChatFormat::read_chatml(std::string_view source) {
  name_ = "ChatML";
  if (!contains(source, "<|im_start|>assistant\n") || !contains(source, "add_generation_prompt")) {
    refusal_ = "the template begins no answer as ChatML does";
  } else if (contains_any(source, {"assistant\n<think>", "'<think>\n'", "\"<think>\n\""})) {
    refusal_ = "the template begins an answer with thoughts";
  } else if (contains_any(source,
                          {"strftime_now", "| trim", "|trim", "render_content", "system_prompt"})) {
    refusal_ = "the template writes more than the messages of ChatML";
  }
  default_system_ = text_between(source, "<|im_start|>system\n", "<|im_end|>");
  if (!default_system_ && addresses_model(source))
    refusal_ = "the template has an unknown default system message";
  system_place_ = SystemPlace::own_turn;
  before_system_ = "<|im_start|>system\n";
  after_system_ = "<|im_end|>\n";
  before_user_ = "<|im_start|>user\n";
  after_user_ = "<|im_end|>\n<|im_start|>assistant\n";
}

void ChatFormat::read_llama3(std::string_view source) {
  name_ = "Llama 3";
  if (!contains(source, "<|eot_id|>") || !contains_any(source, {"| trim", "|trim"}) ||
      !contains(source, "<|start_header_id|>assistant<|end_header_id|>\n\n")) {
    refusal_ = "the template does not write messages as Llama 3 does";
  }
  system_place_ = SystemPlace::own_turn;
  trims_system_ = trims_user_ = true;
  before_system_ = "<|start_header_id|>system<|end_header_id|>\n\n";
  after_system_ = "<|eot_id|>";
  before_user_ = "<|start_header_id|>user<|end_header_id|>\n\n";
  after_user_ = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n";
  if (!contains(source, "Today Date: ")) return;
  // Llama 3.1 to 3.3 always write a system message.
  if (!contains(source, "Cutting Knowledge Date: December 2023\n") ||
      !contains(source, "26 Jul 2024")) {
    refusal_ = "the template writes dates differently from Llama 3.1";
  }
  default_system_ = "";
  before_system_ += fmt::format("Cutting Knowledge Date: December 2023\nToday Date: {}\n\n",
                                contains(source, "strftime_now") ? today() : "26 Jul 2024");
}

void ChatFormat::read_mistral(std::string_view source) {
  name_ = "Mistral";
  const std::optional<Literal> open = literal_around(source, "[INST]");
  const std::optional<Literal> close = literal_around(source, "[/INST]");
  if (!open || !close || close->begin < open->end) {
    refusal_ = "the template does not write messages as Mistral does";
    return;
  }
  before_user_ = source.substr(open->begin, open->end - open->begin);
  after_user_ = source.substr(close->begin, close->end - close->begin);
  const std::string_view between = source.substr(open->end, close->begin - open->end);
  if (contains_any(between, {"trim", "strip", "if ", "upper", "replace"})) {
    refusal_ = "the template does more to a message than Mistral's does";
  }
  if (contains_any(between, {"system_message + \"\n\n\" + message[\"content\"]",
                             "system_message + '\n\n' + message['content']"})) {
    system_place_ = SystemPlace::user_turn;
    after_system_ = "\n\n";
  }
}

void ChatFormat::read_gemma(std::string_view source) {
  name_ = "Gemma";
  if (!contains(source, "<end_of_turn>\n") || !contains(source, "<start_of_turn>model\n") ||
      !contains_any(source, {"| trim", "|trim"})) {
    refusal_ = "the template does not write messages as Gemma does";
  }
  before_user_ = "<start_of_turn>user\n";
  after_user_ = "<end_of_turn>\n<start_of_turn>model\n";
  trims_user_ = true;
  if (!contains(source, "first_user_prefix")) return;
  system_place_ = SystemPlace::user_turn;
  after_system_ = "\n\n";
}

std::string ChatFormat::render(const ChatPrompt& prompt) const {
  if (!refusal_.empty()) fail(ErrorCode::unsupported, "{}", refusal_);
  check_argument(!prompt.system || system_place_ != SystemPlace::none,
                 "the chat format {} of this template has no system message", name_);
  const std::optional<std::string>& given = prompt.system ? prompt.system : default_system_;
  std::string system;
  if (given) {
    system = before_system_;
    system += trims_system_ ? trimmed(*given) : std::string_view(*given);
    system += after_system_;
  }
  const std::string_view user = trims_user_ ? trimmed(prompt.user) : std::string_view(prompt.user);
  std::string text = bos_;
  if (system_place_ == SystemPlace::own_turn) text += system;
  text += before_user_;
  if (system_place_ == SystemPlace::user_turn) text += system;
  return text.append(user).append(after_user_);
}

}  // namespace fovea
