// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tokenizer/chat_template/builtins.h"
#include "tokenizer/chat_template/python_text.h"
#include "tokenizer/utf8.h"

namespace fovea::jinja {
namespace {

class Writer {
 public:
  explicit Writer(const JsonStyle& style) : style_(style) {}

  void write(const Value& value, int level) {
    if (const std::string* text = value.text()) return write_text(*text);
    if (const Dict* dict = value.dict()) return write_dict(*dict, level);
    if (const List* list = value.items()) return write_list(*list, level);
    if (!value.is_none() && !value.is_number())
      throw Failure{fmt::format("a {} cannot be written as JSON", value.type_name())};
    out_ += plain(value);
  }

  std::string take() { return std::move(out_); }

 private:
  static std::string plain(const Value& value) {
    if (value.is_none()) return "null";
    if (value.is_bool()) return value.truth() ? "true" : "false";
    if (value.is_integer()) return std::to_string(value.integer());
    const double number = value.number();
    if (std::isnan(number)) return "NaN";
    if (std::isinf(number)) return number < 0 ? "-Infinity" : "Infinity";
    return float_text(number);
  }

  void write_text(std::string_view text) {
    constexpr std::string_view kEscaped = "\"\\\n\r\t\b\f", kNames = "\"\\nrtbf";
    out_ += '"';
    for (const std::string_view character : characters(text)) {
      const uint32_t point = code_point(character);
      const size_t named = character.size() == 1 ? kEscaped.find(character[0]) : kEscaped.npos;
      if (named != kEscaped.npos) {
        out_ += '\\';
        out_ += kNames[named];
      } else if (point < 0x20 || (style_.ascii && point > 0x7E && point < 0x10000)) {
        out_ += fmt::format("\\u{:04x}", point);
      } else if (style_.ascii && point >= 0x10000) {
        out_ += fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + ((point - 0x10000) >> 10),
                            0xDC00 + ((point - 0x10000) & 0x3FF));
      } else {
        out_ += character;
      }
    }
    out_ += '"';
  }

  void line(int level) {
    if (!style_.indent) return;
    out_ += '\n';
    for (int i = 0; i < level; ++i) out_ += *style_.indent;
  }

  void write_list(const List& list, int level) {
    out_ += '[';
    for (size_t i = 0; i < list.size(); ++i) {
      if (i > 0) out_ += style_.item_separator;
      line(level + 1);
      write(list[i], level + 1);
    }
    if (!list.empty()) line(level);
    out_ += ']';
  }

  void write_dict(const Dict& dict, int level) {
    std::vector<const Dict::Entry*> entries;
    for (const Dict::Entry& entry : dict.entries()) entries.push_back(&entry);
    if (style_.sorted) {
      std::ranges::stable_sort(entries, [](const Dict::Entry* left, const Dict::Entry* right) {
        return compare(left->first, right->first) < 0;
      });
    }
    out_ += '{';
    for (size_t i = 0; i < entries.size(); ++i) {
      if (i > 0) out_ += style_.item_separator;
      line(level + 1);
      const Value& key = entries[i]->first;
      if (key.is_tuple()) throw Failure{"a key of JSON cannot be a tuple"};
      write_text(key.text() ? *key.text() : plain(key));
      out_ += style_.key_separator;
      write(entries[i]->second, level + 1);
    }
    if (!entries.empty()) line(level);
    out_ += '}';
  }

  const JsonStyle& style_;
  std::string out_;
};

}  // namespace

std::string write_json(const Value& value, const JsonStyle& style) {
  Writer writer(style);
  writer.write(value, 0);
  return writer.take();
}

}  // namespace fovea::jinja
