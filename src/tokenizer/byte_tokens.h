// SPDX-License-Identifier: Apache-2.0
// Byte fallback: the tokens "<0x00>" to "<0xFF>" represent single bytes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "tokenizer/vocabulary.h"

namespace fovea {

class ByteTokens {
 public:
  explicit ByteTokens(const Vocabulary& vocabulary);

  // Appends the tokens of all bytes of `text`. If one is missing, appends nothing and returns
  // false.
  bool append(std::string_view text, std::vector<int32_t>& tokens) const;

 private:
  std::array<int32_t, 256> tokens_ = {};
};

// Returns the byte that a token's text names, for example "<0x0A>". Digits may have either case.
std::optional<char> byte_of_token(std::string_view token);

}  // namespace fovea
