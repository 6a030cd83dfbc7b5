// SPDX-License-Identifier: Apache-2.0
// Regular expressions of tokenizers, which are written for Oniguruma and run on PCRE2.
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

// Memory that matching needs; each thread needs its own.
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
  // Throws Error{unsupported} naming an unsupported construct, or Error{corrupt_file} describing a
  // syntax error, for the file `name`.
  static Pattern from_regex(std::string_view regex, std::string_view name);
  static Pattern from_literal(std::string_view literal, std::string_view name);
  // Compiles a pattern of this library in the syntax of PCRE2. With `own_tables` it uses only
  // PCRE2's Unicode tables.
  static Pattern from_pcre(std::string_view pcre, bool own_tables = false);
  ~Pattern();
  Pattern(Pattern&&) noexcept;
  Pattern& operator=(Pattern&&) noexcept;

  // Returns true if the pattern is a text that matches only itself.
  bool is_literal() const;
  std::string_view literal() const;  // returns that text, or an empty one
  // Returns true if characters newer than PCRE2's tables must be replaced, see MatchText.
  bool needs_older_characters() const;
  // Returns the first non-empty match in valid UTF-8 text at or after byte `from`. Throws
  // Error{unsupported} if the pattern exceeds a limit of backtracking.
  std::optional<MatchRange> find(std::string_view text, size_t from, PatternScratch& scratch) const;

 private:
  struct Data;
  explicit Pattern(std::unique_ptr<Data> data);
  static Pattern compile(std::string_view pcre, std::string_view shown, std::string_view name);

  std::unique_ptr<Data> data_;
};

// The text in which a pattern searches. Tokenizers use newer Unicode tables than PCRE2, so a
// regular expression gets older characters of the same kind.
class MatchText {
 public:
  // Both arguments must outlive the object.
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

// Returns true if Rust's \w matches the character, which must be valid UTF-8.
bool is_word_character(std::string_view character);

}  // namespace fovea
