// SPDX-License-Identifier: Apache-2.0
// Byte fallback: tokens "<0x00>" to "<0xFF>" stand for single bytes.
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

  // Appends the tokens of all bytes of `text`; false, and nothing is appended, if one is missing.
  bool append(std::string_view text, std::vector<int32_t>& tokens) const;

 private:
  std::array<int32_t, 256> tokens_ = {};
};

// The byte that a token's text names ("<0x0A>", in digits of either case).
std::optional<char> byte_of_token(std::string_view token);

}  // namespace fovea
