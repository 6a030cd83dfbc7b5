// SPDX-License-Identifier: Apache-2.0
// Byte-pair encoding of one word (Sennrich et al. 2016, arXiv:1508.07909): its characters are
// joined pair by pair, in the order of the merges of the file.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/byte_tokens.h"
#include "tokenizer/vocabulary.h"

namespace fovea {

struct Merge {
  int32_t rank = 0;
  int32_t merged = 0;
};

// Merges by the pair of tokens that they join.
class MergeTable {
 public:
  explicit MergeTable(size_t merges);  // that will be added, at most

  // The last of equal pairs counts.
  void add(int32_t left, int32_t right, Merge merge);
  const Merge* find(int32_t left, int32_t right) const;

 private:
  struct Slot {
    uint64_t pair = ~uint64_t{0};  // free
    Merge merge;
  };

  size_t slot_of(uint64_t pair) const;

  std::vector<Slot> slots_;  // a power of two of them, at most half in use
};

struct BpeOptions {
  std::optional<std::string> unk_token;  // unset: unknown characters are dropped
  bool fuse_unk = false;                 // unknown characters side by side become one unk_token
  bool byte_fallback = false;            // unknown characters become the tokens of their bytes
  bool ignore_merges = false;            // a word that is a token is that token
};

class BpeModel {
 public:
  BpeModel(Vocabulary vocabulary, MergeTable merges, BpeOptions options);

  const Vocabulary& vocabulary() const { return vocabulary_; }

  // Appends the tokens of `word`, valid UTF-8 of under 2^31 bytes. Of equal ranks the leftmost goes
  // first. Time is O(n log n): a heap over a linked list. Error{unsupported} for an unknown
  // character when unk_token is not in the vocabulary.
  void encode(std::string_view word, std::vector<int32_t>& tokens) const;

 private:
  // The tokens of the single characters.
  std::vector<int32_t> character_tokens(std::string_view word) const;
  int32_t character_token(std::string_view character) const;
  int32_t unk() const;

  Vocabulary vocabulary_;
  MergeTable merges_;
  BpeOptions options_;
  ByteTokens bytes_;
  int32_t unk_ = Vocabulary::kNone;
  std::vector<int32_t> common_;  // tokens of the first code points
};

}  // namespace fovea
