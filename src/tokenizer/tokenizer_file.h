// SPDX-License-Identifier: Apache-2.0
// What a tokenizer.json says, checked and in the form that encoding needs.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tokenizer/added_tokens.h"
#include "tokenizer/bpe.h"
#include "tokenizer/pattern.h"

namespace fovea {

// One step of pre-tokenization: a piece of text becomes the matches of the pattern and the rests
// between them.
struct SplitStage {
  bool prefix_space = false;  // pieces get a leading space when they have none
  std::optional<Pattern> pattern;
  bool keep_matches = true;
  bool keep_rests = true;
};

struct TextHash : std::hash<std::string_view> {
  using is_transparent = void;
};
using TokenIds = std::unordered_map<std::string, int32_t, TextHash, std::equal_to<>>;

struct TokenizerFile {
  std::vector<std::string> bytes;  // by token; empty where there is none
  std::vector<bool> special;       // by token
  TokenIds ids;                    // of the model's vocabulary, by bytes
  BytePairMerger merger;
  bool ignore_merges = false;  // a word that is a token is that token
  AddedTokenFinder raw_added;
  AddedTokenFinder normalized_added;
  bool nfc = false;
  std::vector<SplitStage> stages;
  std::vector<int32_t> prefix, suffix;  // around every text
};

// Error{corrupt_file} or {unsupported}; `name` is the file.
TokenizerFile read_tokenizer_file(std::string_view json, std::string_view name);

}  // namespace fovea
