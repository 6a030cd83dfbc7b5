// SPDX-License-Identifier: Apache-2.0
// Byte-pair encoding of one word (Sennrich et al. 2016, arXiv:1508.07909). Joins neighbouring
// symbols pair by pair, in the order of the merges in the file, beginning with characters.
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

// Maps each pair of tokens to the merge that joins it.
class MergeTable {
 public:
  explicit MergeTable(size_t merges);  // max number of merges

  // A later merge of the same pair replaces the earlier one.
  void add(int32_t left, int32_t right, Merge merge);
  const Merge* find(int32_t left, int32_t right) const;

 private:
  struct Slot {
    uint64_t pair = ~uint64_t{0};  // value of a free slot
    Merge merge;
  };

  size_t slot_of(uint64_t pair) const;

  std::vector<Slot> slots_;  // the number is a power of two; at most half are in use
};

struct BpeOptions {
  std::optional<std::string> unk_token;  // if unset, unknown characters are dropped
  bool fuse_unk = false;                 // a run of unknown characters becomes one unk_token
  bool byte_fallback = false;            // unknown characters become the tokens of their bytes
  bool ignore_merges = false;            // a word that is a token is not split
};

class BpeModel {
 public:
  BpeModel(Vocabulary vocabulary, MergeTable merges, BpeOptions options);

  const Vocabulary& vocabulary() const { return vocabulary_; }

  // Appends the tokens of `word`, which is valid UTF-8 below 2^31 bytes. The leftmost of equally
  // ranked pairs merges first. Takes O(n log n) time with a heap over a linked list. Throws
  // Error{unsupported} for an unknown character if unk_token is not in the vocabulary.
  void encode(std::string_view word, std::vector<int32_t>& tokens) const;

 private:
  // Returns the tokens of the single characters.
  std::vector<int32_t> character_tokens(std::string_view word) const;
  int32_t character_token(std::string_view character) const;
  int32_t unk() const;

  Vocabulary vocabulary_;
  MergeTable merges_;
  BpeOptions options_;
  ByteTokens bytes_;
  int32_t unk_ = Vocabulary::kNone;
  std::vector<int32_t> common_;  // tokens of the lowest code points
};

}  // namespace fovea
