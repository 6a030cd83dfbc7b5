// SPDX-License-Identifier: Apache-2.0
// Added tokens: texts that become one token wherever they stand, before anything else is split.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace fovea {

struct AddedToken {
  int32_t id = -1;
  std::string content;
  bool special = false;     // left out when decoding
  bool normalized = false;  // looked for after normalisation
  bool lstrip = false;      // takes the white space before it with it
  bool rstrip = false;      // ... after it
};

// A part of a text: an added token, or (token -1) what lies between them.
struct TextPart {
  std::string_view text;
  int32_t token = -1;
};

class AddedTokenFinder {
 public:
  void add(const AddedToken& token);

  // Splits valid UTF-8 at the leftmost longest occurrences. Parts without a token are not empty.
  std::vector<TextPart> split(std::string_view text) const;

 private:
  static constexpr int32_t kNone = -1;

  // Index of the longest added token that `text` starts with, or kNone.
  int32_t longest_at(std::string_view text) const;

  std::vector<AddedToken> tokens_;
  std::vector<int32_t> node_tokens_ = {kNone};      // by trie node: index of the token ending there
  std::unordered_map<uint64_t, int32_t> children_;  // by node * 256 + byte
};

}  // namespace fovea
