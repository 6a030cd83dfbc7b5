// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/chat_template/python_text.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "tokenizer/utf8.h"

namespace fovea::jinja {
namespace {

utf8proc_category_t category(uint32_t point) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(point));
}

std::string_view first_character(std::string_view text) {
  return text.substr(0, next_utf8(text).bytes);
}

std::string_view last_character(std::string_view text) {
  size_t begin = text.size() - 1;
  while (begin > 0 && (static_cast<uint8_t>(text[begin]) & 0xC0) == 0x80) --begin;
  return text.substr(begin);
}

std::string mapped(std::string_view text, utf8proc_int32_t (*map)(utf8proc_int32_t)) {
  std::string result;
  result.reserve(text.size());
  for (const std::string_view character : characters(text))
    append_utf8(static_cast<uint32_t>(map(static_cast<utf8proc_int32_t>(code_point(character)))),
                result);
  return result;
}

bool is_printable(uint32_t point) {
  switch (category(point)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return false;
    case UTF8PROC_CATEGORY_ZS:
      return point == ' ';
    default:
      return true;
  }
}

// Returns the bytes of the line end that begins the text, 0 if there is none.
size_t line_end(std::string_view text) {
  if (text.starts_with("\r\n")) return 2;
  if (text.find_first_of("\n\r\v\f\x1C\x1D\x1E") == 0) return 1;
  if (text.starts_with("\xC2\x85")) return 2;
  if (text.starts_with("\xE2\x80\xA8") || text.starts_with("\xE2\x80\xA9")) return 3;
  return 0;
}

}  // namespace

bool is_space(uint32_t point) { return is_white_space(point) || (point >= 0x1C && point <= 0x1F); }

bool is_letter_or_digit(uint32_t point) {
  const utf8proc_category_t kind = category(point);
  return (kind >= UTF8PROC_CATEGORY_LU && kind <= UTF8PROC_CATEGORY_LO) ||
         (kind >= UTF8PROC_CATEGORY_ND && kind <= UTF8PROC_CATEGORY_NO);
}

std::vector<std::string_view> characters(std::string_view text) {
  std::vector<std::string_view> parts;
  parts.reserve(text.size());
  while (!text.empty()) {
    parts.push_back(first_character(text));
    text.remove_prefix(parts.back().size());
  }
  return parts;
}

int64_t length(std::string_view text) {
  return std::ranges::count_if(
      text, [](char byte) { return (static_cast<uint8_t>(byte) & 0xC0) != 0x80; });
}

int64_t position_of(std::string_view text, size_t byte) { return length(text.substr(0, byte)); }

std::string_view strip(std::string_view text, Side side, std::optional<std::string_view> chars) {
  const auto removed = [&](std::string_view character) {
    return chars ? chars->find(character) != chars->npos : is_space(code_point(character));
  };
  while (side != Side::right && !text.empty() && removed(first_character(text)))
    text.remove_prefix(first_character(text).size());
  while (side != Side::left && !text.empty() && removed(last_character(text)))
    text.remove_suffix(last_character(text).size());
  return text;
}

std::string replace_all(std::string_view text, std::string_view old, std::string_view with,
                        int64_t count) {
  std::string result;
  const size_t size = text.size();
  size_t at = 0;
  for (; count != 0 && at <= size; --count) {
    const size_t found = old.empty() ? at : text.find(old, at);
    if (found == text.npos) break;
    result.append(text.substr(at, found - at)).append(with);
    at = found + old.size();
    if (!old.empty()) continue;
    if (at == size) return result;
    const std::string_view character = first_character(text.substr(at));
    result += character;
    at += character.size();
  }
  return at < size ? result.append(text.substr(at)) : result;
}

std::vector<std::string_view> split(std::string_view text, std::string_view separator,
                                    int64_t count) {
  std::vector<std::string_view> parts;
  for (size_t found; count != 0 && (found = text.find(separator)) != text.npos; --count) {
    parts.push_back(text.substr(0, found));
    text.remove_prefix(found + separator.size());
  }
  parts.push_back(text);
  return parts;
}

std::vector<std::string_view> split_from_right(std::string_view text, std::string_view separator,
                                               int64_t count) {
  std::vector<std::string_view> parts;
  for (size_t found; count != 0 && (found = text.rfind(separator)) != text.npos; --count) {
    parts.push_back(text.substr(found + separator.size()));
    text = text.substr(0, found);
  }
  parts.push_back(text);
  std::ranges::reverse(parts);
  return parts;
}

std::vector<std::string_view> split_words(std::string_view text, int64_t count) {
  std::vector<std::string_view> parts;
  text = strip(text, Side::left);
  while (!text.empty()) {
    if (count == 0) {
      parts.push_back(text);
      break;
    }
    size_t end = 0;
    while (end < text.size() && !is_space(code_point(first_character(text.substr(end)))))
      end += first_character(text.substr(end)).size();
    parts.push_back(text.substr(0, end));
    text = strip(text.substr(end), Side::left);
    --count;
  }
  return parts;
}

std::vector<std::string_view> split_lines(std::string_view text, bool keep_ends) {
  std::vector<std::string_view> lines;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = line_end(text.substr(at));
    if (end > 0) {
      lines.push_back(text.substr(begin, at - begin + (keep_ends ? end : 0)));
      begin = at + end;
    }
    at += std::max<size_t>(end, 1);
  }
  if (begin < text.size()) lines.push_back(text.substr(begin));
  return lines;
}

std::string to_lower(std::string_view text) { return mapped(text, utf8proc_tolower); }

std::string to_upper(std::string_view text) { return mapped(text, utf8proc_toupper); }

std::string capitalized(std::string_view text) {
  if (text.empty()) return {};
  const std::string_view first = first_character(text);
  return mapped(first, utf8proc_totitle) + to_lower(text.substr(first.size()));
}

std::string titled(std::string_view text, bool (*separates)(uint32_t point)) {
  std::string result;
  bool begins = true;
  for (const std::string_view character : characters(text)) {
    result += begins ? mapped(character, utf8proc_totitle) : to_lower(character);
    begins = separates(code_point(character));
  }
  return result;
}

std::string repr_of(std::string_view text) {
  const char mark = text.find('\'') != text.npos && text.find('"') == text.npos ? '"' : '\'';
  std::string result(1, mark);
  for (const std::string_view character : characters(text)) {
    const uint32_t point = code_point(character);
    if (point == '\\' || point == static_cast<uint32_t>(mark)) {
      result.append("\\").append(character);
    } else if (point == '\n' || point == '\r' || point == '\t') {
      result += point == '\n' ? "\\n" : point == '\r' ? "\\r" : "\\t";
    } else if (is_printable(point)) {
      result += character;
    } else if (point < 0x100) {
      result += fmt::format("\\x{:02x}", point);
    } else {
      result += point < 0x10000 ? fmt::format("\\u{:04x}", point) : fmt::format("\\U{:08x}", point);
    }
  }
  return result + mark;
}

std::string float_text(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number < 0 ? "-inf" : "inf";
  char text[32];
  const double size = std::abs(number);
  const bool plain = size == 0 || (size >= 1e-4 && size < 1e16);
  const auto form = plain ? std::chars_format::fixed : std::chars_format::scientific;
  const std::string digits(text, std::to_chars(text, std::end(text), number, form).ptr);
  return plain && digits.find('.') == digits.npos ? digits + ".0" : digits;
}

}  // namespace fovea::jinja
