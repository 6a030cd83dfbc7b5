// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/pattern_translator.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/quote.h"

namespace fovea {
namespace {

constexpr std::array<std::string_view, 37> kCategories = {
    "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N",  "Nd", "Nl",
    "No", "P",  "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S",  "Sm", "Sc", "Sk",
    "So", "Z",  "Zs", "Zl", "Zp", "C",  "Cc", "Cf", "Cs", "Co", "Cn"};

constexpr std::array<std::string_view, 7> kGroups = {"(?:",  "(?i:", "(?=", "(?!",
                                                     "(?<=", "(?<!", "(?>"};

// Letter pairs that a caseless group of Oniguruma also matches with one character ("ß").
constexpr std::array<std::string_view, 5> kFolded = {"ss", "ff", "fi", "fl", "st"};

bool is_ascii(char c) { return static_cast<unsigned char>(c) < 0x80; }
bool is_punctuation(char c) {
  return is_ascii(c) && std::ispunct(static_cast<unsigned char>(c)) != 0;
}
char lower(char c) { return static_cast<char>(std::tolower(static_cast<unsigned char>(c))); }

class Translator {
 public:
  Translator(std::string_view regex, std::string_view name) : regex_(regex), name_(name) {}

  std::string translate() {
    // At every position in a run of spaces, this pattern would search for the end of the run again.
    if (regex_ == "\\s+$") {
      return fmt::format("(?<![{0}])[{0}]+(?m:$)", kWhiteSpaceClass);
    }
    while (at_ < regex_.size()) {
      const char c = regex_[at_];
      if (c == '\\') {
        escape();
      } else if (in_class_) {
        class_character(c);
      } else {
        character(c);
      }
    }
    return std::move(out_);
  }

 private:
  struct Group {
    bool caseless = false;
    size_t begin = 0;  // position in out_
  };

  [[noreturn]] void refuse(std::string_view construct) const {
    fail(ErrorCode::unsupported, "{}: {} in the pattern {} is not supported", name_, construct,
         quote(regex_));
  }

  bool next_is(std::string_view text) const { return regex_.substr(at_).starts_with(text); }
  bool next_is_quantifier() const {
    return next_is("+") || next_is("?") || next_is("*") || next_is("{");
  }
  bool caseless() const { return !groups_.empty() && groups_.back().caseless; }

  void copy(size_t bytes) {
    out_ += regex_.substr(at_, bytes);
    at_ += bytes;
  }

  // Marks the begin of the operand of a quantifier.
  void begin_atom() {
    if (!in_class_) atom_ = out_.size();
    previous_ = '\0';
  }

  // Writes `as` for the input `written`, which represents several characters.
  void put_class(std::string_view written, std::string_view as) {
    if (caseless()) refuse(fmt::format("{} inside (?i:)", quote(written)));
    // "a-\s" is no range, but PCRE2 would use the first character of the replacement as its end.
    if (in_class_ && out_.back() == '-') refuse("a class after '-'");
    begin_atom();
    out_ += as;
    at_ += written.size();
  }

  void put_anchor(std::string_view written, std::string_view as) {
    begin_atom();
    out_ += as;
    at_ += written.size();
    if (next_is_quantifier()) refuse("an anchor and a quantifier");
  }

  void escape() {
    if (at_ + 1 == regex_.size()) refuse("a final backslash");
    const char c = regex_[at_ + 1];
    const std::string_view written = regex_.substr(at_, 2);
    const auto in_brackets = [&](std::string_view format, std::string_view members) {
      return in_class_ ? std::string(members) : fmt::format(fmt::runtime(format), members);
    };
    if (is_punctuation(c) || c == 'n' || c == 'r' || c == 't') {
      begin_atom();
      copy(2);
    } else if (c == 's') {
      put_class(written, in_brackets("[{}]", kWhiteSpaceClass));
    } else if (c == 'S' && !in_class_) {
      put_class(written, fmt::format("[^{}]", kWhiteSpaceClass));
    } else if (c == 'w') {
      put_class(written, in_brackets("[{}]", kWordClass));
    } else if (c == 'W' && !in_class_) {
      put_class(written, fmt::format("[^{}]", kWordClass));
    } else if (c == 'd') {
      put_class(written, "\\p{Nd}");
    } else if (c == 'D') {
      put_class(written, "\\P{Nd}");
    } else if (c == 'p' || c == 'P') {
      property();
    } else if (c == 'u') {
      code_point_escape();
    } else if ((c == 'A' || c == 'z') && !in_class_) {
      put_anchor(written, written);
    } else if (c == 'b' && !in_class_) {
      put_anchor(written, fmt::format("(?:(?<=[{0}])(?![{0}])|(?<![{0}])(?=[{0}]))", kWordClass));
    } else {
      refuse(fmt::format("{}{}", quote(written), in_class_ ? " inside a class" : ""));
    }
  }

  void property() {
    const size_t end = regex_.find('}', at_);
    if (end == regex_.npos || regex_[at_ + 2] != '{') refuse("a property without braces");
    const std::string_view category = regex_.substr(at_ + 3, end - at_ - 3);
    const std::string_view written = regex_.substr(at_, end + 1 - at_);
    if (std::find(kCategories.begin(), kCategories.end(), category) == kCategories.end()) {
      refuse(quote(written));
    }
    put_class(written, written);
  }

  // Translates \uHHHH.
  void code_point_escape() {
    const std::string_view digits = regex_.substr(at_ + 2, 4);
    const auto is_digit = [](char d) { return std::isxdigit(static_cast<unsigned char>(d)) != 0; };
    const bool is_surrogate = lower(digits[0]) == 'd' && digits.size() == 4 && digits[1] >= '8';
    if (digits.size() != 4 || !std::ranges::all_of(digits, is_digit) || is_surrogate || caseless())
      refuse(quote(regex_.substr(at_, 6)));
    begin_atom();
    out_ += fmt::format("\\x{{{}}}", digits);
    at_ += 6;
  }

  void class_character(char c) {
    if (c == '[' || next_is("&&")) refuse("a class inside a class");
    if (c == ']') in_class_ = false;
    if (caseless() && !is_ascii(c)) refuse("a character beyond ASCII inside (?i:)");
    copy(1);
  }

  void character(char c) {
    if (c == '^') {
      put_anchor("^", "(?m:^)");
    } else if (c == '$') {
      put_anchor("$", "(?m:$)");
    } else if (c == '[') {
      begin_atom();
      copy(next_is("[^") ? 2 : 1);
      if (next_is("]")) refuse("an empty class");
      in_class_ = true;
    } else if (c == '(') {
      group();
    } else if (c == ')') {
      if (!groups_.empty()) {
        atom_ = groups_.back().begin;
        groups_.pop_back();
      }
      previous_ = '\0';
      copy(1);
    } else if (c == '{') {
      repetition();
    } else {
      literal(c);
    }
  }

  void literal(char c) {
    if (c == '+' || c == '?' || c == '*' || c == '|') return copy(1);
    const char before = std::exchange(previous_, lower(c));
    if (caseless()) {
      if (!is_ascii(c)) refuse("a character beyond ASCII inside (?i:)");
      const std::array<char, 2> pair = {before, lower(c)};
      if (std::ranges::find(kFolded, std::string_view(pair.data(), 2)) != kFolded.end()) {
        refuse(fmt::format("'{}' inside (?i:)", std::string_view(pair.data(), 2)));
      }
    }
    const bool continues_character = (static_cast<unsigned char>(c) & 0xC0) == 0x80;
    if (!continues_character) atom_ = out_.size();
    copy(1);
  }

  void group() {
    size_t bytes = 1;
    if (next_is("(?") || next_is("(*")) {
      const auto known = std::find_if(kGroups.begin(), kGroups.end(),
                                      [&](std::string_view group) { return next_is(group); });
      if (known == kGroups.end()) refuse(quote(regex_.substr(at_, 3)));
      bytes = known->size();
    }
    groups_.push_back({caseless() || next_is("(?i:"), out_.size()});
    previous_ = '\0';
    copy(bytes);
  }

  // Translates {2}, {2,} and {2,3}. "{2}+" is possessive in PCRE2 only: Oniguruma repeats the
  // repetition.
  void repetition() {
    const size_t end = std::min(regex_.find('}', at_), regex_.size());
    const std::string_view inside = regex_.substr(at_ + 1, end - at_ - 1);
    const bool counts = !inside.empty() && std::isdigit(static_cast<unsigned char>(inside[0])) &&
                        inside.find_first_not_of("0123456789,") == inside.npos;
    if (!counts) refuse("'{' that is no repetition");
    copy(end + 1 - at_);
    if (next_is("+")) {
      out_.insert(atom_, "(?:");
      out_ += ")+";
      ++at_;
    }
    if (next_is_quantifier()) refuse("'}' and a quantifier");
  }

  std::string_view regex_;
  std::string_view name_;
  size_t at_ = 0;
  bool in_class_ = false;
  std::vector<Group> groups_;  // open groups
  size_t atom_ = 0;            // position in out_ of the operand of a quantifier
  char previous_ = '\0';       // preceding literal in lower case
  std::string out_;
};

}  // namespace

std::string translate_pattern(std::string_view regex, std::string_view name) {
  return Translator(regex, name).translate();
}

}  // namespace fovea
