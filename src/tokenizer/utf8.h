// SPDX-License-Identifier: Apache-2.0
// Decodes UTF-8 that may be invalid.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace fovea {

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

enum class Utf8Kind : uint8_t {
  whole,   // a complete character
  broken,  // bytes that no character begins with
  cut,     // a character that the end of the text cuts
};

struct Utf8Unit {
  Utf8Kind kind = Utf8Kind::whole;
  size_t bytes = 0;
};

// Returns the first character of a non-empty text, or the longest prefix of one (Unicode 15, table
// 3-8, "substitution of maximal subparts", as in Rust and browsers).
Utf8Unit next_utf8(std::string_view text);

// Replaces each broken or cut unit by U+FFFD.
std::string replace_broken_utf8(std::string_view text);

// Returns the code point of a complete character.
uint32_t code_point(std::string_view character);

void append_utf8(uint32_t point, std::string& out);

// Returns true for characters with Unicode's White_Space property.
bool is_white_space(uint32_t point);

// Converts pieces of bytes to text. Withholds the bytes of an incomplete character.
class Utf8Stream {
 public:
  std::string push(std::string_view bytes);  // returns text that is final
  std::string finish();  // returns the rest; an incomplete character becomes U+FFFD

 private:
  std::string pending_;
};

}  // namespace fovea
