// SPDX-License-Identifier: Apache-2.0
// Pre-tokenizers of tokenizer.json: steps that split a text into the words that the model encodes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "tokenizer/normalizer.h"
#include "tokenizer/pattern.h"

namespace fovea {

// Treatment of a pattern's matches. The texts between matches are always kept.
enum class SplitBehavior : uint8_t {
  removed,
  isolated,              // each match is a word
  contiguous,            // a run of adjacent matches is one word
  merged_with_previous,  // each match is appended to the preceding text
  merged_with_next,      // each match is prepended to the following text
};

struct SplitStep {
  Pattern pattern;
  SplitBehavior behavior = SplitBehavior::isolated;
  bool invert = false;  // exchanges the roles of matches and of the texts between them
};

// Splits by the pattern, then turns bytes into letters.
struct ByteLevelStep {
  bool prefix_space = false;  // adds a leading space to texts that have none
  std::optional<Pattern> pattern;
};

enum class PrependScheme : uint8_t { always, never, first };

// Turns spaces into `replacement`. `scheme` selects the texts that get one in front.
struct MetaspaceStep {
  std::string replacement;  // one character
  PrependScheme scheme = PrependScheme::always;
  bool split = true;  // begins a word at every replacement
};

struct FixedLengthStep {
  size_t length = 0;  // characters per word
};

using PreTokenizerStep = std::variant<SplitStep, ByteLevelStep, MetaspaceStep, FixedLengthStep>;

class PreTokenizer {
 public:
  void add(PreTokenizerStep step) { steps_.push_back(std::move(step)); }
  size_t steps() const { return steps_.size(); }

  // Calls `word` for every word of the text in order. Words are not empty.
  void split(const NormalizedText& text, const std::function<void(std::string_view)>& word) const;

 private:
  std::vector<PreTokenizerStep> steps_;
};

}  // namespace fovea
