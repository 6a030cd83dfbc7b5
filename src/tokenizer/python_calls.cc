// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/python_calls.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "tokenizer/tool_values.h"
#include "tokenizer/utf8.h"

namespace fovea {
namespace {

using Json = nlohmann::ordered_json;

bool is_of_word(char c) {
  const bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  return is_letter || (c >= '0' && c <= '9') || c == '_' || c == '.' || c == '-' || c == '+';
}

// Reads from the front of a text. What returns an optional returns nothing where the text is
// something else.
class PythonReader {
 public:
  explicit PythonReader(std::string_view text) : text_(text) {}

  std::optional<std::vector<ToolCall>> calls() {
    std::vector<ToolCall> calls;
    const bool is_list = take('[');
    while (!(is_list && take(']'))) {
      const auto call = read_call();
      if (!call) return std::nullopt;
      calls.push_back(*call);
      if (!is_list) break;
      if (!ends_item(']')) return std::nullopt;
    }
    skip_space();
    return text_.empty() ? std::optional(calls) : std::nullopt;
  }

 private:
  void skip_space() {
    text_.remove_prefix(std::min(text_.find_first_not_of(kSpace), text_.size()));
  }

  bool take(char c) {
    skip_space();
    if (!text_.starts_with(c)) return false;
    text_.remove_prefix(1);
    return true;
  }
  // Takes the comma behind an item, unless the closing mark follows at once.
  bool ends_item(char close) {
    skip_space();
    return take(',') || text_.starts_with(close);
  }

  // Returns the next name, number or word; it may be empty.
  std::string_view take_word() {
    skip_space();
    size_t size = 0;
    while (size < text_.size() && is_of_word(text_[size])) ++size;
    const std::string_view word = text_.substr(0, size);
    text_.remove_prefix(size);
    return word;
  }

  std::optional<ToolCall> read_call() {
    ToolCall call{std::string(take_word()), {}};
    if (call.name.empty() || !take('(')) return std::nullopt;
    Json arguments = Json::object();
    while (!take(')')) {
      const std::string key(take_word());
      if (key.empty() || !take('=')) return std::nullopt;
      const auto value = read_value(1);
      if (!value || !ends_item(')')) return std::nullopt;
      arguments[key] = *value;
    }
    call.arguments = arguments.dump(-1, ' ', false, Json::error_handler_t::replace);
    return call;
  }

  std::optional<Json> read_value(int depth) {
    if (depth > kMaxValueDepth) return std::nullopt;
    if (take('[')) return read_list(']', depth);
    if (take('(')) return read_list(')', depth);
    if (take('{')) return read_dictionary(depth);
    if (text_.starts_with('"') || text_.starts_with('\'')) return read_text();
    const std::string_view word = take_word();
    if (word == "True" || word == "False") return word == "True";
    if (word == "None") return Json();
    const Json value = Json::parse(word, nullptr, false);
    return value.is_discarded() ? std::nullopt : std::optional(value);
  }

  std::optional<Json> read_list(char close, int depth) {
    Json list = Json::array();
    while (!take(close)) {
      const auto value = read_value(depth + 1);
      if (!value || !ends_item(close)) return std::nullopt;
      list.push_back(*value);
    }
    return list;
  }

  std::optional<Json> read_dictionary(int depth) {
    Json dictionary = Json::object();
    while (!take('}')) {
      skip_space();
      const auto key = read_text();
      if (!key || !take(':')) return std::nullopt;
      const auto value = read_value(depth + 1);
      if (!value || !ends_item('}')) return std::nullopt;
      dictionary[*key] = *value;
    }
    return dictionary;
  }

  // Reads a text in single or double quotes, one or three of them. Models write line ends into
  // either.
  std::optional<std::string> read_text() {
    if (!text_.starts_with('"') && !text_.starts_with('\'')) return std::nullopt;
    std::string quote(3, text_[0]);
    if (!text_.starts_with(quote)) quote.resize(1);
    text_.remove_prefix(quote.size());
    std::string all;
    while (!text_.starts_with(quote)) {
      if (text_.empty()) return std::nullopt;
      const char c = text_[0];
      text_.remove_prefix(1);
      if (c == '\\') {
        if (!read_escape(all)) return std::nullopt;
      } else {
        all += c;
      }
    }
    text_.remove_prefix(quote.size());
    return all;
  }

  // Reads what follows a backslash. As in Python, the backslash stays where nothing is escaped.
  bool read_escape(std::string& to) {
    constexpr std::string_view kNames = "\\'\"abfnrtv", kValues = "\\'\"\a\b\f\n\r\t\v";
    if (text_.empty()) return false;
    const char c = text_[0];
    text_.remove_prefix(1);
    if (const size_t at = kNames.find(c); at != kNames.npos) {
      to += kValues[at];
    } else if (c == 'x' || c == 'u' || c == 'U') {
      return read_code_point(c == 'x' ? 2 : c == 'u' ? 4 : 8, to);
    } else if (c != '\n') {
      to += '\\';
      to += c;
    }
    return true;
  }

  bool read_code_point(size_t digits, std::string& to) {
    if (text_.size() < digits) return false;
    uint32_t point = 0;
    const char* const end = text_.data() + digits;
    const auto [stop, error] = std::from_chars(text_.data(), end, point, 16);
    const bool is_point = point <= 0x10FFFF && !(point >= 0xD800 && point <= 0xDFFF);
    if (stop != end || error != std::errc() || !is_point) return false;
    append_utf8(point, to);
    text_.remove_prefix(digits);
    return true;
  }

  std::string_view text_;
};

}  // namespace

std::vector<ToolCall> read_python_calls(std::string_view text) {
  return PythonReader(text).calls().value_or(std::vector<ToolCall>());
}

}  // namespace fovea
