// SPDX-License-Identifier: Apache-2.0
// The precompiled_charsmap of sentencepiece: a map from characters and short sequences to what
// replaces them, as a double-array trie.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fovea {

enum class CharsmapMatch : uint8_t {
  // As the `tokenizers` package does it: grapheme clusters of fewer than 6 bytes as a whole if the
  // map knows a beginning of them, everything else character by character.
  graphemes,
  longest,  // as sentencepiece does it: at every place the longest sequence that the map knows
};

class Charsmap {
 public:
  // `bytes` are a length, a trie of that length and the replacements, each with a zero byte behind.
  // Error{corrupt_file} when they are not; `name` is the file.
  Charsmap(std::string_view bytes, std::string_view name,
           CharsmapMatch match = CharsmapMatch::graphemes);

  std::string apply(std::string_view text) const;

 private:
  struct Replacement {
    size_t bytes = 0;  // that it replaces
    std::string_view text;
  };

  // What replaces the shortest or the longest beginning of the text that the map knows.
  std::optional<Replacement> replacement(std::string_view text) const;
  void apply_to_grapheme(std::string_view grapheme, std::string& out) const;

  CharsmapMatch match_;
  std::vector<uint32_t> trie_;
  std::string replacements_;
};

// The bytes that base64 stands for; Error{corrupt_file} when it is none.
std::string decode_base64(std::string_view text, std::string_view name);

}  // namespace fovea
