// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>
#include <vector>

#include "core/check.h"
#include "model/json.h"

namespace fovea {
namespace {

constexpr size_t kMaxPatternBytes = 10'000;
// A quarter of a second; a run of 20 MB of spaces needs less.
constexpr uint32_t kMatchLimit = 40'000'000;
constexpr size_t kJitStackBytes = 8 << 20;

// White_Space of Unicode, to stand inside a class. PCRE2's own \s has U+180E in addition.
constexpr std::string_view kWhiteSpace = "\\t-\\r\\x{85}\\p{Z}";

constexpr std::array<std::string_view, 37> kCategories = {
    "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N",  "Nd", "Nl",
    "No", "P",  "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S",  "Sm", "Sc", "Sk",
    "So", "Z",  "Zs", "Zl", "Zp", "C",  "Cc", "Cf", "Cs", "Co", "Cn"};

constexpr std::array<std::string_view, 6> kGroups = {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!"};

bool is_punctuation(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return byte < 0x80 && std::ispunct(byte) != 0;
}

// Writes an Oniguruma pattern so that PCRE2 with UTF and UCP means the same by it.
class Translator {
 public:
  Translator(std::string_view regex, std::string_view name) : regex_(regex), name_(name) {}

  std::string translate() {
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
  [[noreturn]] void refuse(std::string_view construct) const {
    fail(ErrorCode::unsupported, "{}: {} in the pattern '{}' is not supported", name_, construct,
         clipped(regex_));
  }

  bool next_is(std::string_view text) const { return regex_.substr(at_).starts_with(text); }

  void copy(size_t bytes) {
    out_ += regex_.substr(at_, bytes);
    at_ += bytes;
  }

  void put_class(std::string_view written, std::string_view as) {
    if (caseless_.size() > 0 && caseless_.back()) refuse("a class inside (?i:)");
    // "a-\s" is no range, and PCRE2 would read the first character of the replacement as its end.
    if (in_class_ && out_.back() == '-') refuse("a class after '-'");
    out_ += as;
    at_ += written.size();
  }

  void escape() {
    if (at_ + 1 == regex_.size()) refuse("a final backslash");
    const char c = regex_[at_ + 1];
    const std::string_view written = regex_.substr(at_, 2);
    if (is_punctuation(c) || c == 'n' || c == 'r' || c == 't') {
      copy(2);
    } else if (c == 's') {
      put_class(written, in_class_ ? std::string(kWhiteSpace) : fmt::format("[{}]", kWhiteSpace));
    } else if (c == 'S' && !in_class_) {
      put_class(written, fmt::format("[^{}]", kWhiteSpace));
    } else if (c == 'd') {
      put_class(written, "\\p{Nd}");
    } else if (c == 'D') {
      put_class(written, "\\P{Nd}");
    } else if (c == 'p' || c == 'P') {
      property();
    } else {
      refuse(fmt::format("'{}'{}", written, in_class_ ? " inside a class" : ""));
    }
  }

  void property() {
    const size_t end = regex_.find('}', at_);
    if (end == regex_.npos || regex_[at_ + 2] != '{') refuse("a property without braces");
    const std::string_view category = regex_.substr(at_ + 3, end - at_ - 3);
    const std::string_view written = regex_.substr(at_, end + 1 - at_);
    if (std::find(kCategories.begin(), kCategories.end(), category) == kCategories.end()) {
      refuse(fmt::format("'{}'", written));
    }
    put_class(written, written);
  }

  void class_character(char c) {
    if (c == '[' || next_is("&&")) refuse("a class inside a class");
    if (c == ']') in_class_ = false;
    copy(1);
  }

  void character(char c) {
    if (c == '.' || c == '^' || c == '$') refuse(fmt::format("'{}'", c));
    if (c == '[') {
      if (caseless_.size() > 0 && caseless_.back()) refuse("a class inside (?i:)");
      copy(next_is("[^") ? 2 : 1);
      if (next_is("]")) refuse("an empty class");
      in_class_ = true;
    } else if (c == '(') {
      group();
    } else if (c == '{') {
      repetition();
    } else {
      if (c == ')' && !caseless_.empty()) caseless_.pop_back();
      copy(1);
    }
  }

  void group() {
    const bool outer = !caseless_.empty() && caseless_.back();
    size_t bytes = 1;
    if (next_is("(?") || next_is("(*")) {
      const auto known = std::find_if(kGroups.begin(), kGroups.end(),
                                      [&](std::string_view group) { return next_is(group); });
      if (known == kGroups.end()) refuse(fmt::format("'{}'", regex_.substr(at_, 3)));
      bytes = known->size();
    }
    caseless_.push_back(outer || next_is("(?i:"));
    copy(bytes);
  }

  // {2}, {2,} and {2,3}. What follows must be no second quantifier: "{2}+" is possessive in PCRE2
  // only.
  void repetition() {
    const size_t end = std::min(regex_.find('}', at_), regex_.size());
    const std::string_view inside = regex_.substr(at_ + 1, end - at_ - 1);
    const bool counts = !inside.empty() && std::isdigit(static_cast<unsigned char>(inside[0])) &&
                        inside.find_first_not_of("0123456789,") == inside.npos;
    if (!counts) refuse("'{' that is no repetition");
    copy(end + 1 - at_);
    if (next_is("+") || next_is("?") || next_is("*") || next_is("{"))
      refuse("'}' and a quantifier");
  }

  std::string_view regex_;
  std::string_view name_;
  size_t at_ = 0;
  bool in_class_ = false;
  std::vector<bool> caseless_;  // of the groups that are open
  std::string out_;
};

std::string message_of(int error) {
  std::array<PCRE2_UCHAR, 256> text = {};
  pcre2_get_error_message(error, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

template <auto function>
struct Free {
  template <typename T>
  void operator()(T* pointer) const {
    function(pointer);
  }
};

template <typename T, auto function>
using Owned = std::unique_ptr<T, Free<function>>;

}  // namespace

struct PatternScratch::Data {
  Owned<pcre2_match_context, pcre2_match_context_free> context;
  Owned<pcre2_match_data, pcre2_match_data_free> match;
  Owned<pcre2_jit_stack, pcre2_jit_stack_free> jit_stack;
};

PatternScratch::PatternScratch() : data_(std::make_unique<Data>()) {
  data_->context.reset(pcre2_match_context_create(nullptr));
  data_->match.reset(pcre2_match_data_create(1, nullptr));
  if (data_->context == nullptr || data_->match == nullptr) {
    fail(ErrorCode::out_of_memory, "no memory for pattern matching");
  }
  pcre2_set_match_limit(data_->context.get(), kMatchLimit);
}

PatternScratch::~PatternScratch() = default;

struct Pattern::Data {
  Owned<pcre2_code, pcre2_code_free> code;
  std::string shown;
};

Pattern::Pattern(std::unique_ptr<Data> data) : data_(std::move(data)) {}
Pattern::~Pattern() = default;
Pattern::Pattern(Pattern&&) noexcept = default;
Pattern& Pattern::operator=(Pattern&&) noexcept = default;

Pattern Pattern::from_regex(std::string_view regex, std::string_view name) {
  return compile(Translator(regex, name).translate(), regex, name);
}

Pattern Pattern::from_literal(std::string_view literal, std::string_view name) {
  std::string quoted;
  for (const char c : literal) {
    if (is_punctuation(c)) quoted += '\\';
    quoted += c;
  }
  return compile(quoted, literal, name);
}

Pattern Pattern::compile(const std::string& pcre, std::string_view shown, std::string_view name) {
  if (pcre.size() > kMaxPatternBytes) {
    fail(ErrorCode::corrupt_file, "{}: a pattern of {} bytes, the limit is {}", name, pcre.size(),
         kMaxPatternBytes);
  }
  auto data = std::make_unique<Data>();
  data->shown = clipped(shown);
  int error = 0;
  size_t offset = 0;
  data->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pcre.data()), pcre.size(),
                                 PCRE2_UTF | PCRE2_UCP, &error, &offset, nullptr));
  if (data->code == nullptr) {
    fail(ErrorCode::corrupt_file, "{}: the pattern '{}': {}", name, data->shown, message_of(error));
  }
  uint32_t can_be_empty = 0;
  pcre2_pattern_info(data->code.get(), PCRE2_INFO_MATCHEMPTY, &can_be_empty);
  if (can_be_empty != 0) {
    fail(ErrorCode::unsupported, "{}: the pattern '{}' matches the empty text", name, data->shown);
  }
  // Fails where there is no JIT; matching is then interpreted.
  pcre2_jit_compile(data->code.get(), PCRE2_JIT_COMPLETE);
  return Pattern(std::move(data));
}

std::optional<MatchRange> Pattern::find(std::string_view text, size_t from,
                                        PatternScratch& scratch) const {
  pcre2_match_data* match = scratch.data_->match.get();
  const auto run = [&] {
    return pcre2_match(data_->code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                       from, PCRE2_NO_UTF_CHECK, match, scratch.data_->context.get());
  };
  int count = run();
  if (count == PCRE2_ERROR_JIT_STACKLIMIT && scratch.data_->jit_stack == nullptr) {
    // Rare, and mapping this stack for every text costs more than most texts.
    scratch.data_->jit_stack.reset(pcre2_jit_stack_create(32 << 10, kJitStackBytes, nullptr));
    pcre2_jit_stack_assign(scratch.data_->context.get(), nullptr, scratch.data_->jit_stack.get());
    count = run();
  }
  if (count == PCRE2_ERROR_NOMATCH) return std::nullopt;
  if (count < 0) {
    fail(ErrorCode::unsupported, "the pattern '{}' cannot be matched: {}", data_->shown,
         message_of(count));
  }
  const size_t* range = pcre2_get_ovector_pointer(match);
  return MatchRange{range[0], range[1]};
}

}  // namespace fovea
