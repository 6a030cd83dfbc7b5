// SPDX-License-Identifier: Apache-2.0
// Byte-pair encoding of one word (Sennrich et al. 2016, arXiv:1508.07909).
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace fovea {

class BytePairMerger {
 public:
  // The token that stands for a byte alone.
  void set_byte(uint8_t byte, int32_t token) { byte_tokens_[byte] = token; }

  // `left` and `right` side by side become `merged`; lower ranks go first. Of equal pairs the last
  // counts.
  void add_merge(int32_t left, int32_t right, int32_t rank, int32_t merged);

  // Appends the tokens of `word` (under 2^31 bytes). Of equal ranks the leftmost goes first. Time
  // is O(n log n): a heap over a linked list.
  void encode(std::string_view word, std::vector<int32_t>& tokens) const;

 private:
  struct Merge {
    int32_t rank = 0;
    int32_t merged = 0;
  };

  const Merge* find(int32_t left, int32_t right) const;

  std::array<int32_t, 256> byte_tokens_ = {};
  std::unordered_map<uint64_t, Merge> merges_;  // keyed by the pair
};

}  // namespace fovea
