// SPDX-License-Identifier: Apache-2.0
// Files that several tokenizer tests read.
#pragma once

#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace fovea {

// Returns a file below testdata/.
inline nlohmann::json read_json(const std::string& path) {
  std::ifstream file(FOVEA_SOURCE_DIR "/testdata/" + path);
  return nlohmann::json::parse(file);
}

// The tokenizer of the test models: ByteLevel with the pattern of GPT-2.
inline const nlohmann::json& model_json() {
  static const nlohmann::json document = read_json("models/llama/tokenizer.json");
  return document;
}

inline std::string utf8(uint32_t point) {
  std::string out;
  const auto tail = [&](int shift) { out += static_cast<char>(0x80 | ((point >> shift) & 0x3F)); };
  if (point < 0x80) {
    out += static_cast<char>(point);
  } else if (point < 0x800) {
    out += static_cast<char>(0xC0 | point >> 6);
    tail(0);
  } else if (point < 0x10000) {
    out += static_cast<char>(0xE0 | point >> 12);
    tail(6), tail(0);
  } else {
    out += static_cast<char>(0xF0 | point >> 18);
    tail(12), tail(6), tail(0);
  }
  return out;
}

}  // namespace fovea
