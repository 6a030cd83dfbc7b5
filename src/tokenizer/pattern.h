// SPDX-License-Identifier: Apache-2.0
// Regular expressions of pre-tokenizers. They are written for Oniguruma and run on PCRE2; a
// construct that the two read differently, and that no known tokenizer needs, is refused by name.
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
  ~Pattern();
  Pattern(Pattern&&) noexcept;
  Pattern& operator=(Pattern&&) noexcept;

  // The first match in valid UTF-8 text at or after byte `from`, never empty. Error{unsupported}
  // when the pattern backtracks beyond all measure.
  std::optional<MatchRange> find(std::string_view text, size_t from, PatternScratch& scratch) const;

 private:
  struct Data;
  explicit Pattern(std::unique_ptr<Data> data);
  static Pattern compile(const std::string& pcre, std::string_view shown, std::string_view name);

  std::unique_ptr<Data> data_;
};

}  // namespace fovea
