// SPDX-License-Identifier: Apache-2.0
// A tokenizer.json as it is read: what may be large (vocabulary, merges, added tokens) in compact
// arrays, the rest as JSON, and fields that nobody needs not at all.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "tokenizer/added_tokens.h"
#include "tokenizer/vocabulary.h"

namespace fovea {

inline constexpr int32_t kMaxTokens = 1 << 21;  // ids are smaller
inline constexpr size_t kMaxAddedBytes = 1024;  // of an added token

// Pairs of token texts, in order.
class MergeList {
 public:
  struct Pair {
    std::string_view left, right;
  };

  void add(std::string_view left, std::string_view right) {
    texts_.append(left).append(right);
    left_ends_.push_back(texts_.size() - right.size());
    ends_.push_back(texts_.size());
  }
  size_t size() const { return ends_.size(); }
  Pair pair(size_t index) const {
    const size_t begin = index == 0 ? 0 : ends_[index - 1];
    const std::string_view both = std::string_view(texts_).substr(begin, ends_[index] - begin);
    return {both.substr(0, left_ends_[index] - begin), both.substr(left_ends_[index] - begin)};
  }

 private:
  std::string texts_;
  std::vector<size_t> left_ends_, ends_;
};

struct TokenizerDocument {
  std::optional<Config> root;  // normalizer, pre_tokenizer, post_processor, decoder, model
  bool has_vocabulary = false;
  bool is_unigram = false;     // the vocabulary is a list of texts and scores
  Vocabulary vocabulary;       // of the model
  std::vector<double> scores;  // by id, when is_unigram
  std::optional<MergeList> merges;
  std::vector<AddedToken> added;
};

// Error{corrupt_file} names the field; `name` is the file. Takes memory in proportion to the text.
TokenizerDocument parse_tokenizer_document(std::string_view text, std::string_view name);

}  // namespace fovea
