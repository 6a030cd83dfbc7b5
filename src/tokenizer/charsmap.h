// SPDX-License-Identifier: Apache-2.0
// The precompiled_charsmap of sentencepiece: a double-array trie that maps characters and short
// sequences to their replacements.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fovea {

enum class CharsmapMatch : uint8_t {
  // Follows the `tokenizers` package: replaces a whole grapheme cluster below 6 bytes if the map
  // contains a prefix of it; maps everything else character by character.
  graphemes,
  longest,  // follows sentencepiece: replaces the longest known sequence at each position
};

class Charsmap {
 public:
  // `bytes` contains a length, a trie of that length, and replacements that end in zero bytes.
  // Throws Error{corrupt_file} naming the file `name` if it does not.
  Charsmap(std::string_view bytes, std::string_view name,
           CharsmapMatch match = CharsmapMatch::graphemes);

  std::string apply(std::string_view text) const;

 private:
  struct Replacement {
    size_t bytes = 0;  // number of replaced bytes
    std::string_view text;
  };

  // Returns the replacement of the shortest or longest prefix of the text in the map.
  std::optional<Replacement> replacement(std::string_view text) const;
  void apply_to_grapheme(std::string_view grapheme, std::string& out) const;

  CharsmapMatch match_;
  std::vector<uint32_t> trie_;
  std::string replacements_;
};

// Decodes base64. Throws Error{corrupt_file} for invalid text.
std::string decode_base64(std::string_view text, std::string_view name);

}  // namespace fovea
