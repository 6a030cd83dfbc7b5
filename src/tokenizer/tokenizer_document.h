// SPDX-License-Identifier: Apache-2.0
// A parsed tokenizer.json. Large parts (vocabulary, merges, added tokens) are in compact arrays,
// the rest is JSON, and unused fields are dropped.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/json_object.h"
#include "tokenizer/added_tokens.h"
#include "tokenizer/vocabulary.h"

namespace fovea {

inline constexpr int32_t kMaxTokens = 1 << 21;  // bound of ids
inline constexpr size_t kMaxAddedBytes = 1024;  // per added token

// A sequence of pairs of token texts.
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
  std::optional<JsonObject> root;  // normalizer, pre_tokenizer, post_processor, decoder, model
  bool has_vocabulary = false;
  bool is_unigram = false;     // the vocabulary is a list of texts and scores
  Vocabulary vocabulary;       // vocabulary of the model
  std::vector<double> scores;  // per id, if is_unigram
  std::optional<MergeList> merges;
  std::vector<AddedToken> added;
};

// Throws Error{corrupt_file} naming the field and the file `name`. Takes memory in proportion to
// the text.
TokenizerDocument parse_tokenizer_document(std::string_view text, std::string_view name);

}  // namespace fovea
