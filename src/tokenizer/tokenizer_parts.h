// SPDX-License-Identifier: Apache-2.0
// The parts of a tokenizer, in the order in which they process a text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "tokenizer/added_tokens.h"
#include "tokenizer/bpe.h"
#include "tokenizer/decoder.h"
#include "tokenizer/normalizer.h"
#include "tokenizer/pre_tokenizer.h"
#include "tokenizer/unigram.h"

namespace fovea {

using TokenizerModel = std::variant<BpeModel, UnigramModel>;

struct TokenizerParts {
  explicit TokenizerParts(TokenizerModel encoder) : model(std::move(encoder)) {}

  // Checks the ids of added tokens against each other and the vocabulary, and sets the members
  // below that depend on them. Requires the normalizer. Errors name the file `name`.
  void set_added_tokens(std::vector<AddedToken> tokens, std::string_view name);

  const Vocabulary& vocabulary() const {
    return std::visit([](const auto& known) -> const Vocabulary& { return known.vocabulary(); },
                      model);
  }
  // Returns true if the id is a token.
  bool has(int32_t token) const;
  std::string_view text(int32_t token) const;  // requires has()
  bool is_special(int32_t token) const;
  int32_t size() const;  // largest id + 1

  AddedTokenFinder raw_added;  // applied first
  Normalizer normalizer;
  AddedTokenFinder normalized_added;
  PreTokenizer pre_tokenizer;
  TokenizerModel model;
  std::vector<int32_t> prefix, suffix;  // added around every text
  Decoder decoder;

 private:
  struct AddedText {
    std::string text;
    bool special = false;
  };
  std::unordered_map<int32_t, AddedText> added_texts_;
  int32_t added_size_ = 0;  // largest id of an added token + 1
};

}  // namespace fovea
