// SPDX-License-Identifier: Apache-2.0
// Added tokens: texts that always become one token, before anything else is split.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/byte_trie.h"

namespace fovea {

struct AddedToken {
  int32_t id = -1;
  std::string content;
  bool special = false;      // omitted by decoding
  bool normalized = false;   // searched for after normalization
  bool single_word = false;  // matches only if no word continues on either side
  bool lstrip = false;       // includes the white space before it
  bool rstrip = false;       // includes the white space after it
};

// A part of a text: an added token, or the text between added tokens (token -1).
struct TextPart {
  size_t begin = 0;
  size_t end = 0;
  int32_t token = -1;
};

// Finds added tokens with the automaton of Aho and Corasick (1975).
class AddedTokenFinder {
 public:
  AddedTokenFinder() = default;
  explicit AddedTokenFinder(std::vector<AddedToken> tokens);

  // Splits valid UTF-8 at the leftmost longest matches. Parts without a token are not empty.
  std::vector<TextPart> split(std::string_view text) const;

 private:
  static constexpr int32_t kNone = -1;

  struct Match {
    size_t begin = 0;
    size_t end = 0;
    int32_t index = kNone;  // index into tokens_
  };

  // Returns the leftmost longest match that begins at or after `from`, or index kNone.
  Match find(std::string_view text, size_t from) const;
  int32_t next_node(int32_t node, char byte) const;

  std::vector<AddedToken> tokens_;
  ByteTrie trie_;                   // values are indices into tokens_
  std::vector<int32_t> fallbacks_;  // per node: its longest proper suffix that is a node
  std::vector<int32_t> depths_;     // per node
  std::vector<int32_t> longest_;    // per node: the longest token that ends there, or kNone
};

}  // namespace fovea
