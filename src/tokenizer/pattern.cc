// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include <array>
#include <utility>

#include "core/check.h"
#include "core/quote.h"
#include "tokenizer/pattern_translator.h"
#include "tokenizer/unicode.h"

namespace fovea {
namespace {

constexpr size_t kMaxPatternBytes = 10'000;
// This limit allows a quarter of a second. A run of 20 MB of spaces stays below it.
constexpr uint32_t kMatchLimit = 40'000'000;
constexpr size_t kJitStackBytes = 8 << 20;

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
  Owned<pcre2_code, pcre2_code_free> code;  // null if the pattern is the text `literal`
  std::string literal;
  bool own_tables = false;
  std::string shown;
};

Pattern::Pattern(std::unique_ptr<Data> data) : data_(std::move(data)) {}
Pattern::~Pattern() = default;
Pattern::Pattern(Pattern&&) noexcept = default;
Pattern& Pattern::operator=(Pattern&&) noexcept = default;

Pattern Pattern::from_regex(std::string_view regex, std::string_view name) {
  return compile(translate_pattern(regex, name), regex, name);
}

Pattern Pattern::from_literal(std::string_view literal, std::string_view name) {
  if (literal.empty() || literal.size() > kMaxPatternBytes) {
    fail(ErrorCode::corrupt_file, "{}: a pattern of {} bytes, must have 1 to {}", name,
         literal.size(), kMaxPatternBytes);
  }
  auto data = std::make_unique<Data>();
  data->literal = literal;
  return Pattern(std::move(data));
}

Pattern Pattern::from_pcre(std::string_view pcre, bool own_tables) {
  Pattern pattern = compile(pcre, pcre, "a pattern");
  pattern.data_->own_tables = own_tables;
  return pattern;
}

Pattern Pattern::compile(std::string_view pcre, std::string_view shown, std::string_view name) {
  if (pcre.size() > kMaxPatternBytes) {
    fail(ErrorCode::corrupt_file, "{}: a pattern of {} bytes, the limit is {}", name, pcre.size(),
         kMaxPatternBytes);
  }
  auto data = std::make_unique<Data>();
  data->shown = quote(shown);
  const Owned<pcre2_compile_context, pcre2_compile_context_free> context(
      pcre2_compile_context_create(nullptr));
  if (context == nullptr) fail(ErrorCode::out_of_memory, "no memory for the pattern {}", shown);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  size_t offset = 0;
  data->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pcre.data()), pcre.size(),
                                 PCRE2_UTF | PCRE2_UCP, &error, &offset, context.get()));
  if (data->code == nullptr) {
    fail(ErrorCode::corrupt_file, "{}: the pattern {}: {}", name, data->shown, message_of(error));
  }
  uint32_t can_be_empty = 0;
  pcre2_pattern_info(data->code.get(), PCRE2_INFO_MATCHEMPTY, &can_be_empty);
  if (can_be_empty != 0) {
    fail(ErrorCode::unsupported, "{}: the pattern {} matches the empty text", name, data->shown);
  }
  // If there is no JIT compiler, matching is interpreted.
  pcre2_jit_compile(data->code.get(), PCRE2_JIT_COMPLETE);
  return Pattern(std::move(data));
}

bool Pattern::is_literal() const { return data_->code == nullptr; }
bool Pattern::needs_older_characters() const { return !is_literal() && !data_->own_tables; }
std::string_view Pattern::literal() const { return data_->literal; }

std::optional<MatchRange> Pattern::find(std::string_view text, size_t from,
                                        PatternScratch& scratch) const {
  if (is_literal()) {
    const size_t begin = text.find(data_->literal, from);
    if (begin == text.npos) return std::nullopt;
    return MatchRange{begin, begin + data_->literal.size()};
  }
  pcre2_match_data* match = scratch.data_->match.get();
  const auto run = [&] {
    return pcre2_match(data_->code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                       from, PCRE2_NO_UTF_CHECK, match, scratch.data_->context.get());
  };
  int count = run();
  if (count == PCRE2_ERROR_JIT_STACKLIMIT && scratch.data_->jit_stack == nullptr) {
    // This stack is seldom needed, and mapping it for each text costs more than matching a typical
    // text.
    scratch.data_->jit_stack.reset(pcre2_jit_stack_create(32 << 10, kJitStackBytes, nullptr));
    pcre2_jit_stack_assign(scratch.data_->context.get(), nullptr, scratch.data_->jit_stack.get());
    count = run();
  }
  if (count == PCRE2_ERROR_NOMATCH) return std::nullopt;
  if (count < 0) {
    fail(ErrorCode::unsupported, "the pattern {} cannot be matched: {}", data_->shown,
         message_of(count));
  }
  const size_t* range = pcre2_get_ovector_pointer(match);
  return MatchRange{range[0], range[1]};
}

MatchText::MatchText(const Pattern& pattern, std::string_view text)
    : pattern_(pattern), text_(text) {
  if (!pattern.needs_older_characters() || !has_new_characters(text)) return;
  older_ = with_older_characters(text);
  text_ = older_;
}

bool is_word_character(std::string_view character) {
  static const Pattern word =
      Pattern::from_pcre(fmt::format("[{}\\x{{200C}}\\x{{200D}}]", kWordClass));
  PatternScratch scratch;
  const std::string old = with_older_characters(character);
  return word.find(old, 0, scratch).has_value();
}

}  // namespace fovea
