// SPDX-License-Identifier: Apache-2.0
// Checksums of ids, and the random texts that they belong to.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <span>
#include <string>

#include "tokenizer/test_files.h"

namespace fovea::test {

inline bool at_any_scale() { return std::getenv("FOVEA_TEST_SCALE") != nullptr; }

inline uint32_t crc32(uint32_t crc, std::span<const int32_t> values) {
  for (const int32_t value : values) {
    crc ^= static_cast<uint32_t>(value);
    for (int bit = 0; bit < 32; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0u);
  }
  return crc;
}

// Texts that mix many kinds of characters, equal to random_texts in make_tokenizer_goldens.py.
class RandomTexts {
 public:
  explicit RandomTexts(uint64_t block) : state_(block) {}
  std::string next() {
    std::string text;
    for (uint64_t left = 1 + draw(24); left > 0; --left) text += piece();
    return text;
  }

 private:
  uint64_t draw(uint64_t below) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return (state_ >> 33) % below;
  }
  std::string piece() {
    constexpr uint32_t kRanges[][2] = {{0x20, 0x7f},     {0x61, 0x7b},       {0x30, 0x3a},
                                       {0x09, 0x0e},     {0xa0, 0x530},      {0x900, 0x980},
                                       {0x4e00, 0x9fa0}, {0x1f600, 0x1f640}, {0x20, 0x21},
                                       {0, 0xd800},      {0xe000, 0x110000}};
    const uint64_t kind = draw(std::size(kRanges) + 1);
    if (kind == std::size(kRanges)) return "<|end|>";
    const auto [first, end] = kRanges[kind];
    return utf8(first + static_cast<uint32_t>(draw(end - first)));
  }

  uint64_t state_;
};

}  // namespace fovea::test
