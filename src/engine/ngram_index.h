// SPDX-License-Identifier: Apache-2.0
// Guesses how a text continues by what followed an earlier occurrence of its last tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace fovea {

// Finds repetitions of one growing text as LZ77 does: places with the same two tokens before them
// are linked from the newest to the oldest. Takes 8 to 16 bytes per token.
class NgramIndex {
 public:
  // Appends to `drafts` up to `count` tokens that followed the longest earlier occurrence of the
  // text's end; of equally long ones, the newest. Appends nothing if the last two tokens are new. A
  // repetition that reaches the end of the text is continued. `text` must begin with the text of
  // the previous call.
  void guess(std::span<const int32_t> text, int32_t count, std::vector<int32_t>& drafts);

 private:
  void read(std::span<const int32_t> text);
  void link(std::span<const int32_t> text, size_t place);
  // Returns the place after the longest earlier occurrence, or 0.
  size_t find(std::span<const int32_t> text) const;
  int32_t& newest(int32_t before_last, int32_t last);

  // A place is the number of tokens before it; 0: none.
  std::vector<int32_t> newest_;  // [power of two] newest place by the hash of the two tokens before
  std::vector<int32_t> previous_;  // by place: the newest earlier place with the same hash
};

}  // namespace fovea
