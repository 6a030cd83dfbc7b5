// SPDX-License-Identifier: Apache-2.0
// Unigram language model (Kudo 2018, arXiv:1804.10959). Splits a text such that the sum of the
// tokens' scores is largest.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "tokenizer/byte_tokens.h"
#include "tokenizer/byte_trie.h"
#include "tokenizer/vocabulary.h"

namespace fovea {

class UnigramModel {
 public:
  // `scores` are indexed by id. Without `unk`, an unknown character throws Error{unsupported}.
  UnigramModel(Vocabulary vocabulary, std::vector<double> scores, std::optional<int32_t> unk,
               bool byte_fallback);

  const Vocabulary& vocabulary() const { return vocabulary_; }

  // Appends the tokens of `word`, which is valid UTF-8. Takes time in proportion to its bytes times
  // the bytes of the longest token. Among equal sums, prefers the split whose last token begins
  // first.
  void encode(std::string_view word, std::vector<int32_t>& tokens) const;

 private:
  // The last token (or unk) of the best split of the text before a position.
  struct Step {
    double score = 0;  // sum so far
    int32_t token = Vocabulary::kNone;
    int32_t bytes = 0;  // 0 if no split ends here
  };

  std::vector<Step> best_steps(std::string_view word) const;
  void append_unknown(std::string_view text, std::vector<int32_t>& tokens) const;

  Vocabulary vocabulary_;
  std::vector<double> scores_;
  std::optional<int32_t> unk_;
  bool byte_fallback_;
  double unk_score_ = 0;
  ByteTokens bytes_;
  ByteTrie trie_;
};

}  // namespace fovea
