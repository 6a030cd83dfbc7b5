// SPDX-License-Identifier: Apache-2.0
// Normalizers of tokenizer.json: steps that rewrite a text before it is split.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tokenizer/charsmap.h"
#include "tokenizer/pattern.h"
#include "tokenizer/unicode_forms.h"

namespace fovea {

// A text, and whether it is at the start of the whole text: only there may Metaspace add a space.
struct NormalizedText {
  std::string text;
  bool at_start = false;
};

struct PrependStep {
  std::string prefix;  // added to texts that are not empty
  bool only_at_start = false;
};
struct ReplaceStep {
  Pattern pattern;
  std::string content;
};
struct StripStep {  // strips white space
  bool left = false;
  bool right = false;
};
struct SingleSpacesStep {};  // leaves one space between words, and none around the text
struct LowercaseStep {};
struct StripAccentsStep {};  // drops combining marks
struct NmtStep {};           // drops control characters and turns some others into white space
struct ByteLettersStep {};   // ByteLevel: bytes become letters

using NormalizerStep =
    std::variant<PrependStep, ReplaceStep, StripStep, SingleSpacesStep, LowercaseStep,
                 StripAccentsStep, NmtStep, ByteLettersStep, UnicodeForm, Charsmap>;

class Normalizer {
 public:
  void add(NormalizerStep step) { steps_.push_back(std::move(step)); }
  size_t steps() const { return steps_.size(); }

  // Applies all steps to valid UTF-8. The result is valid UTF-8.
  NormalizedText apply(std::string_view text, bool at_start) const;

 private:
  std::vector<NormalizerStep> steps_;
};

}  // namespace fovea
