// SPDX-License-Identifier: Apache-2.0
// Regular expressions of tokenizers. They are written for Oniguruma and run on PCRE2.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace fovea {

struct MatchRange {
  size_t begin = 0;
  size_t end = 0;
};

// What matching needs besides the pattern; one per thread.
class PatternScratch {
 public:
  PatternScratch();
  ~PatternScratch();
  PatternScratch(const PatternScratch&) = delete;
  PatternScratch& operator=(const PatternScratch&) = delete;

 private:
  friend class Pattern;
  struct Data;
  std::unique_ptr<Data> data_;
};

class Pattern {
 public:
  // Error{unsupported} names the construct, Error{corrupt_file} what is wrong with the syntax;
  // `name` is the file.
  static Pattern from_regex(std::string_view regex, std::string_view name);
  static Pattern from_literal(std::string_view literal, std::string_view name);
  // A pattern of this library, in the syntax of PCRE2. With `own_tables` it knows no younger
  // characters than PCRE2.
  static Pattern from_pcre(std::string_view pcre, bool own_tables = false);
  ~Pattern();
  Pattern(Pattern&&) noexcept;
  Pattern& operator=(Pattern&&) noexcept;

  // Whether the pattern is a text, which matches nothing but itself.
  bool is_literal() const;
  std::string_view literal() const;  // that text, or nothing
  // Whether younger characters must be given as older ones: MatchText does that.
  bool needs_old_characters() const;
  // The first match in valid UTF-8 text at or after byte `from`, never empty. Error{unsupported}
  // when the pattern backtracks beyond a fixed limit.
  std::optional<MatchRange> find(std::string_view text, size_t from, PatternScratch& scratch) const;

 private:
  struct Data;
  explicit Pattern(std::unique_ptr<Data> data);
  static Pattern compile(std::string_view pcre, std::string_view shown, std::string_view name);

  std::unique_ptr<Data> data_;
};

// A text that a pattern is looked for in. Tokenizers are defined by younger tables of Unicode than
// those of PCRE2, so a regular expression sees older characters of the same kind.
class MatchText {
 public:
  // Both must outlive this.
  MatchText(const Pattern& pattern, std::string_view text);
  MatchText(const MatchText&) = delete;
  MatchText& operator=(const MatchText&) = delete;

  std::optional<MatchRange> find(size_t from, PatternScratch& scratch) const {
    return pattern_.find(text_, from, scratch);
  }

 private:
  const Pattern& pattern_;
  std::string older_;
  std::string_view text_;
};

// Whether Rust's \w matches the character, which is valid UTF-8.
bool is_word_character(std::string_view character);

}  // namespace fovea
