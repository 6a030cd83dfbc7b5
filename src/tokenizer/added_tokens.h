// SPDX-License-Identifier: Apache-2.0
// Added tokens: texts that become one token wherever they stand, before anything else is split.
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
  bool special = false;      // left out when decoding
  bool normalized = false;   // looked for after normalization
  bool single_word = false;  // found only where no word continues on either side
  bool lstrip = false;       // includes the white space before it
  bool rstrip = false;       // includes the white space after it
};

// A part of a text: an added token, or (token -1) what lies between added tokens.
struct TextPart {
  size_t begin = 0;
  size_t end = 0;
  int32_t token = -1;
};

// Finds added tokens by the automaton of Aho and Corasick (1975).
class AddedTokenFinder {
 public:
  AddedTokenFinder() = default;
  explicit AddedTokenFinder(std::vector<AddedToken> tokens);

  // Splits valid UTF-8 at the leftmost longest occurrences. Parts without a token are not empty.
  std::vector<TextPart> split(std::string_view text) const;

 private:
  static constexpr int32_t kNone = -1;

  struct Match {
    size_t begin = 0;
    size_t end = 0;
    int32_t index = kNone;  // into tokens_
  };

  // The leftmost longest occurrence that begins at or after `from`; index kNone where none does.
  Match find(std::string_view text, size_t from) const;
  int32_t next_node(int32_t node, char byte) const;

  std::vector<AddedToken> tokens_;
  ByteTrie trie_;                   // values are indices into tokens_
  std::vector<int32_t> fallbacks_;  // by node: its longest proper suffix that is a node
  std::vector<int32_t> depths_;     // by node
  std::vector<int32_t> longest_;    // by node: the longest token that ends there, or kNone
};

}  // namespace fovea
