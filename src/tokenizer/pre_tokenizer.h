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

// What becomes of the matches of a pattern, beside the texts between them.
enum class SplitBehavior : uint8_t {
  removed,
  isolated,              // each is a word
  contiguous,            // matches side by side are one word
  merged_with_previous,  // each is the end of the text before it
  merged_with_next,      // each is the beginning of the text behind it
};

struct SplitStep {
  Pattern pattern;
  SplitBehavior behavior = SplitBehavior::isolated;
  bool invert = false;  // the texts between the matches count as matches, and matches as texts
};

// Bytes become letters, after a split by the pattern.
struct ByteLevelStep {
  bool prefix_space = false;  // texts get a leading space when they have none
  std::optional<Pattern> pattern;
};

enum class PrependScheme : uint8_t { always, never, first };

// Spaces become `replacement`, and `scheme` says which texts get one in front.
struct MetaspaceStep {
  std::string replacement;  // a character
  PrependScheme scheme = PrependScheme::always;
  bool split = true;  // a word begins at every replacement
};

struct FixedLengthStep {
  size_t length = 0;  // characters of a word
};

using PreTokenizerStep = std::variant<SplitStep, ByteLevelStep, MetaspaceStep, FixedLengthStep>;

class PreTokenizer {
 public:
  void add(PreTokenizerStep step) { steps_.push_back(std::move(step)); }
  size_t steps() const { return steps_.size(); }

  // Calls `word` for every word of the text, in order. No word is empty.
  void split(const NormalizedText& text, const std::function<void(std::string_view)>& word) const;

 private:
  std::vector<PreTokenizerStep> steps_;
};

}  // namespace fovea
