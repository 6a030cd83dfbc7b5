// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/chat_template/lexer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "tokenizer/chat_template/python_text.h"
#include "tokenizer/utf8.h"

namespace fovea::jinja {
namespace {

// The longest signs come first.
constexpr std::array<std::string_view, 28> kSigns = {
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "*", "/", "%", "~", "[", "]",
    "(",  ")",  "{",  "}",  ">",  "<",  "=", ".", ":", "|", ",", ";", "!", "&"};

bool is_digit(char byte) { return byte >= '0' && byte <= '9'; }

bool in_name(uint32_t point) { return point == '_' || is_letter_or_digit(point); }

class Lexer {
 public:
  explicit Lexer(std::string_view source) {
    if (replace_broken_utf8(source) != source) throw SyntaxProblem{1, "the text is not UTF-8"};
    source_ = replace_all(replace_all(source, "\r\n", "\n"), "\r", "\n");
    if (source_.ends_with('\n')) source_.pop_back();
  }

  std::vector<Token> run() {
    while (at_ < source_.size()) {
      if (!read_data()) continue;
      read_marked();
    }
    add(TokenKind::end, {});
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail(std::string message) const { throw SyntaxProblem{line_, message}; }

  std::string_view rest() const { return std::string_view(source_).substr(at_); }
  bool follows(std::string_view text) const { return rest().starts_with(text); }
  void add(TokenKind kind, std::string text) { tokens_.push_back({kind, line_, std::move(text)}); }

  void advance(size_t bytes) {
    line_ += static_cast<int>(std::ranges::count(rest().substr(0, bytes), '\n'));
    at_ += bytes;
  }
  void skip_space() { advance(rest().size() - strip(rest(), Side::left).size()); }

  // Reads text up to the next mark and the mark itself, "{{" or "{%" with its sign. Returns false
  // if no expression follows, after a comment, a raw block or the last text.
  bool read_data() {
    size_t mark = at_;
    do {
      mark = source_.find('{', mark);
    } while (mark != source_.npos && mark + 1 < source_.size() &&
             std::string_view("{%#").find(source_[mark + 1]) == std::string_view::npos && ++mark);
    if (mark == source_.npos || mark + 1 >= source_.size()) {
      add(TokenKind::data, source_.substr(at_));
      advance(rest().size());
      return false;
    }
    const char kind = source_[mark + 1];
    const char sign = mark + 2 < source_.size() ? source_[mark + 2] : ' ';
    add_data(rest().substr(0, mark - at_), kind, sign);
    advance(mark - at_ + 2);
    if (sign == '-' || sign == '+') advance(1);
    if (kind == '#') {
      skip_comment();
      return false;
    }
    if (kind == '%' && read_raw()) return false;
    add(kind == '{' ? TokenKind::variable_begin : TokenKind::block_begin, {});
    return true;
  }

  // Adds the text before a mark, without the white space that the mark removes.
  void add_data(std::string_view text, char kind, char sign) {
    if (sign == '-') {
      text = strip(text, Side::right);
    } else if (sign != '+' && kind != '{') {
      const size_t line_begin = text.rfind('\n') + 1;
      if ((line_begin > 0 || at_line_begin_) && strip(text.substr(line_begin)).empty())
        text = text.substr(0, line_begin);
    }
    if (!text.empty()) add(TokenKind::data, std::string(text));
  }

  // Reads the end of a block or comment, "%}" with its sign, and the white space after it that it
  // removes. Returns false if there is another text.
  bool skip_end(std::string_view end) {
    const char sign = follows("-") ? '-' : follows("+") && end != "}}" ? '+' : ' ';
    if (!rest().substr(sign == ' ' ? 0 : 1).starts_with(end)) return false;
    const size_t begin = at_;
    advance(end.size() + (sign == ' ' ? 0 : 1));
    if (sign == '-') {
      skip_space();
    } else if (sign == ' ' && end != "}}" && follows("\n")) {
      advance(1);
    }
    at_line_begin_ = at_ > begin && source_[at_ - 1] == '\n';
    return true;
  }

  void skip_comment() {
    while (at_ < source_.size()) {
      if (skip_end("#}")) return;
      advance(1);
    }
    fail("a comment has no end");
  }

  // Reads "raw %}", the text after it and "{% endraw %}" if they follow.
  bool read_raw() {
    const size_t begin = at_;
    const int line = line_;
    skip_space();
    const bool is_raw = follows("raw");
    if (is_raw) advance(3);
    skip_space();
    const bool keeps_line_end = follows("%}");
    if (!is_raw || !skip_end("%}")) {
      at_ = begin;
      line_ = line;
      return false;
    }
    if (keeps_line_end && at_line_begin_) at_ -= 1, line_ -= 1, at_line_begin_ = false;
    for (size_t mark = at_; (mark = source_.find("{%", mark)) != source_.npos; mark += 2) {
      const char sign = mark + 2 < source_.size() ? source_[mark + 2] : ' ';
      const size_t name = mark + (sign == '-' || sign == '+' ? 3 : 2);
      const std::string_view inside = strip(std::string_view(source_).substr(name), Side::left);
      if (!inside.starts_with("endraw")) continue;
      add_data(rest().substr(0, mark - at_), '%', sign);
      advance(source_.size() - inside.size() - at_ + 6);
      skip_space();
      if (!skip_end("%}")) fail("'endraw' has no end");
      return true;
    }
    fail("a raw block has no end");
  }

  // Reads an expression up to the end of its mark.
  void read_marked() {
    const bool variable = tokens_.back().kind == TokenKind::variable_begin;
    const std::string_view end = variable ? "}}" : "%}";
    std::string open;
    while (true) {
      skip_space();
      if (at_ >= source_.size()) fail(fmt::format("'{}' is missing", end));
      const int line = line_;
      if (open.empty() && skip_end(end)) {
        add(variable ? TokenKind::variable_end : TokenKind::block_end, {});
        tokens_.back().line = line;
        return;
      }
      if (is_digit(source_[at_])) {
        read_number();
      } else if (follows("'") || follows("\"")) {
        read_text();
      } else if (!read_name()) {
        read_sign(open);
      }
    }
  }

  bool read_name() {
    size_t bytes = 0;
    while (at_ + bytes < source_.size()) {
      const std::string_view next = rest().substr(bytes);
      const size_t width = next_utf8(next).bytes;
      if (!in_name(code_point(next.substr(0, width)))) break;
      bytes += width;
    }
    if (bytes == 0) return false;
    add(TokenKind::name, std::string(rest().substr(0, bytes)));
    advance(bytes);
    return true;
  }

  void read_number() {
    size_t end = at_;
    const auto digits = [&] {
      while (end < source_.size() &&
             (is_digit(source_[end]) ||
              (source_[end] == '_' && end + 1 < source_.size() && is_digit(source_[end + 1]))))
        ++end;
    };
    const auto digit_at = [&](size_t at) { return at < source_.size() && is_digit(source_[at]); };
    digits();
    const size_t whole = end;
    const bool after_dot = at_ > 0 && source_[at_ - 1] == '.';
    if (!after_dot && digit_at(end + 1) && source_[end] == '.') {
      ++end;
      digits();
    }
    if (!after_dot && end < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
      const bool sign =
          end + 1 < source_.size() && (source_[end + 1] == '+' || source_[end + 1] == '-');
      if (digit_at(end + 1 + sign)) {
        end += 1 + sign;
        digits();
      }
    }
    std::string text = source_.substr(at_, end - at_);
    std::erase(text, '_');
    if (text.size() > 1 && text[0] == '0' && end == whole &&
        text.find_first_not_of('0') != text.npos)
      fail(fmt::format("the number {} begins with 0", text));
    add(end == whole ? TokenKind::integer : TokenKind::number, std::move(text));
    advance(end - at_);
  }

  void read_text() {
    const char mark = source_[at_];
    const int line = line_;
    std::string text;
    advance(1);
    while (!follows(std::string_view(&mark, 1))) {
      if (at_ >= source_.size()) fail("a string has no end");
      if (follows("\\")) {
        read_escape(text);
      } else {
        text += source_[at_];
        advance(1);
      }
    }
    advance(1);
    tokens_.push_back({TokenKind::text, line, std::move(text)});
  }

  void read_escape(std::string& text) {
    constexpr std::string_view kNames = "\\'\"abfnrtv\n", kMeans = "\\'\"\a\b\f\n\r\t\v";
    advance(1);
    if (at_ >= source_.size()) fail("a string has no end");
    const char name = source_[at_];
    if (const size_t found = kNames.find(name); found != kNames.npos) {
      if (found < kMeans.size()) text += kMeans[found];
      advance(1);
    } else if (name >= '0' && name <= '7') {
      read_code(text, 3, 8);
    } else if (name == 'x' || name == 'u' || name == 'U') {
      advance(1);
      const size_t digits = name == 'x' ? 2 : name == 'u' ? 4 : 8;
      if (read_code(text, digits, 16) != digits)
        fail(fmt::format("\\{} needs {} digits", name, digits));
    } else if (name == 'N') {
      fail("\\N is not supported in strings");
    } else {
      text += '\\';
    }
  }

  // Reads up to `max_digits` digits and appends the character; returns the number of digits.
  size_t read_code(std::string& text, size_t max_digits, uint32_t base) {
    uint32_t point = 0;
    size_t digits = 0;
    for (; digits < max_digits && at_ < source_.size(); ++digits) {
      const char byte = static_cast<char>(source_[at_] | (source_[at_] >= 'A' ? 0x20 : 0));
      const uint32_t digit = is_digit(byte)               ? static_cast<uint32_t>(byte - '0')
                             : byte >= 'a' && byte <= 'f' ? static_cast<uint32_t>(byte - 'a' + 10)
                                                          : base;
      if (digit >= base) break;
      point = point * base + digit;
      advance(1);
    }
    if (point > 0x10FFFF || (point >= 0xD800 && point <= 0xDFFF))
      fail(fmt::format("U+{:X} is no character", point));
    append_utf8(point, text);
    return digits;
  }

  void read_sign(std::string& open) {
    constexpr std::string_view kOpen = "([{", kClose = ")]}";
    const auto sign = std::ranges::find_if(kSigns, [&](auto known) { return follows(known); });
    if (sign == kSigns.end() || *sign == "&" || *sign == "!") {
      const std::string_view character = rest().substr(0, next_utf8(rest()).bytes);
      fail(fmt::format("unexpected '{}'", character));
    }
    if (kOpen.find((*sign)[0]) != kOpen.npos) open += kClose[kOpen.find((*sign)[0])];
    if (kClose.find((*sign)[0]) != kClose.npos) {
      if (open.empty() || open.back() != (*sign)[0]) fail(fmt::format("unexpected '{}'", *sign));
      open.pop_back();
    }
    add(TokenKind::sign, std::string(*sign));
    advance(sign->size());
  }

  std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  bool at_line_begin_ = true;  // the last token ended at a line end
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) { return Lexer(source).run(); }

}  // namespace fovea::jinja
