// SPDX-License-Identifier: Apache-2.0
#include "gpu/source_tokens.h"

#include <algorithm>
#include <array>

namespace fovea::gpu {
namespace {

// Punctuation of several characters, longest first, so that the first match is the token.
constexpr std::array<std::string_view, 26> kPunctuation = {
    "...", "<=>", "<<=", ">>=", "->*", "::", "->", ".*", "++", "--", "<<", ">>", "<=",
    ">=",  "==",  "!=",  "&&",  "||",  "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^="};

// These functions replace those of <cctype>, which query the locale for every character.
constexpr bool is_digit(char c) { return c >= '0' && c <= '9'; }
constexpr bool is_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || is_digit(c) || c == '_' || c == '$';
}
constexpr bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// Scans a source. text() is the unscanned rest.
class Scanner {
 public:
  explicit Scanner(std::string_view source) : text_(source) {}

  bool at_end() const { return text_.empty(); }
  char front() const { return text_.front(); }

  // Skips white space and comments. Reports if there were any, and if a line ended.
  struct Gap {
    bool any = false, line_end = false;
  };
  Gap skip_gap(bool stop_at_line_end) {
    Gap gap;
    while (!text_.empty()) {
      if (text_.starts_with("//")) {
        take(std::min(line_end(), text_.size()));
      } else if (text_.starts_with("/*")) {
        const size_t end = text_.find("*/", 2);
        take(end == text_.npos ? text_.size() : end + 2);
      } else if (text_.starts_with("\\\n")) {
        take(2);
      } else if (is_space(text_.front())) {
        const bool ends_line = text_.front() == '\n';
        if (ends_line && stop_at_line_end) return gap;
        gap.line_end |= ends_line;
        take(1);
      } else {
        return gap;
      }
      gap.any = true;
    }
    return gap;
  }

  // Returns the next token. The text must not be empty and must not begin with a gap.
  std::string_view take_token() {
    if (const size_t prefix = literal_prefix(); prefix != text_.npos) return take_literal(prefix);
    if (is_word(front()) || starts_number()) return take(word_length());
    if (text_.size() > 1 && !is_word(text_[1]) && !is_space(text_[1])) {
      for (const std::string_view token : kPunctuation) {
        if (text_.starts_with(token)) return take(token.size());
      }
    }
    return take(1);
  }

 private:
  std::string_view take(size_t count) {
    const std::string_view taken = text_.substr(0, count);
    text_.remove_prefix(taken.size());
    return taken;
  }

  // A backslash before the end of a line continues it, even in a comment.
  size_t line_end() const {
    size_t end = text_.find('\n');
    while (end != text_.npos && end > 0 && text_[end - 1] == '\\') end = text_.find('\n', end + 1);
    return end;
  }

  bool starts_number() const { return front() == '.' && text_.size() > 1 && is_digit(text_[1]); }

  // Numbers contain points, digit separators and signed exponents.
  size_t word_length() const {
    const bool number = front() == '.' || is_digit(front());
    size_t length = 1;
    for (; length < text_.size(); ++length) {
      const char c = text_[length];
      if (is_word(c)) continue;
      if (number &&
          (c == '.' || (c == '\'' && length + 1 < text_.size() && is_word(text_[length + 1])))) {
        continue;
      }
      if (number && (c == '+' || c == '-') && is_exponent(text_[length - 1])) continue;
      break;
    }
    return length;
  }

  // Returns true if `before` is the exponent letter of the number at the front.
  bool is_exponent(char before) const {
    const bool is_hex = text_.starts_with("0x") || text_.starts_with("0X");
    return before == 'p' || before == 'P' || (!is_hex && (before == 'e' || before == 'E'));
  }

  // Returns the number of characters before the quote of a string or character literal, or npos if
  // the text is none.
  size_t literal_prefix() const {
    constexpr std::string_view kFirst = "\"'LuUR";
    if (kFirst.find(front()) == kFirst.npos) return text_.npos;
    for (const std::string_view prefix : {"", "L", "u", "U", "u8", "R", "LR", "uR", "UR", "u8R"}) {
      if (!text_.starts_with(prefix) || text_.size() == prefix.size()) continue;
      const char quote = text_[prefix.size()];
      if (quote == '"' || (quote == '\'' && !prefix.ends_with('R'))) return prefix.size();
    }
    return text_.npos;
  }

  std::string_view take_literal(size_t prefix) {
    const char quote = text_[prefix];
    if (prefix > 0 && text_[prefix - 1] == 'R') {
      const size_t open = text_.find('(', prefix);
      if (open == text_.npos) return take(text_.size());
      const std::string close =
          ')' + std::string(text_.substr(prefix + 1, open - prefix - 1)) + '"';
      const size_t end = text_.find(close, open);
      return take(end == text_.npos ? text_.size() : end + close.size());
    }
    size_t end = prefix + 1;
    while (end < text_.size() && text_[end] != quote && text_[end] != '\n') {
      end += text_[end] == '\\' ? 2 : 1;
    }
    return take(end + 1);
  }

  std::string_view text_;
};

}  // namespace

std::string source_tokens(std::string_view source) {
  Scanner scanner(source);
  std::string tokens;
  bool line_begins = true;
  for (;;) {
    line_begins |= scanner.skip_gap(/*stop_at_line_end=*/false).line_end;
    if (scanner.at_end()) return tokens;
    const bool is_directive = line_begins && scanner.front() == '#';
    tokens += scanner.take_token();
    line_begins = false;
    // White space is significant in a directive: "#define F (x)" defines no macro with a parameter.
    while (is_directive) {
      const bool spaced = scanner.skip_gap(/*stop_at_line_end=*/true).any;
      if (scanner.at_end() || scanner.front() == '\n') break;
      if (spaced) tokens += ' ';
      tokens += scanner.take_token();
    }
    tokens += '\n';
  }
}

}  // namespace fovea::gpu
