// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/byte_tokens.h"

#include <fmt/core.h>

#include <charconv>

namespace fovea {

ByteTokens::ByteTokens(const Vocabulary& vocabulary) {
  for (int byte = 0; byte < 256; ++byte) {
    tokens_[byte] = vocabulary.find(fmt::format("<0x{:02X}>", byte));
  }
}

bool ByteTokens::append(std::string_view text, std::vector<int32_t>& tokens) const {
  const size_t before = tokens.size();
  for (const char c : text) {
    const int32_t token = tokens_[static_cast<uint8_t>(c)];
    if (token == Vocabulary::kNone) {
      tokens.resize(before);
      return false;
    }
    tokens.push_back(token);
  }
  return true;
}

std::optional<char> byte_of_token(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return std::nullopt;
  uint8_t byte = 0;
  // Like the reference, accepts "+A" as a number.
  const size_t sign = token[3] == '+' ? 1 : 0;
  const char* end = token.data() + 5;
  const auto [rest, error] = std::from_chars(token.data() + 3 + sign, end, byte, 16);
  if (error != std::errc{} || rest != end) return std::nullopt;
  return static_cast<char>(byte);
}

}  // namespace fovea
