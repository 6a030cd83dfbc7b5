// SPDX-License-Identifier: Apache-2.0
// UTF-8 that may be broken.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace fovea {

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

enum class Utf8Kind : uint8_t {
  whole,   // a character
  broken,  // no character can begin with these bytes
  cut,     // the text ends inside a character
};

struct Utf8Unit {
  Utf8Kind kind = Utf8Kind::whole;
  size_t bytes = 0;
};

// The first character of a non-empty text, or the longest beginning of one (Unicode 15, table 3-8:
// "substitution of maximal subparts", what Rust and browsers do).
Utf8Unit next_utf8(std::string_view text);

// Every broken or cut unit becomes one U+FFFD.
std::string replace_broken_utf8(std::string_view text);

// The code point of a whole character.
uint32_t code_point(std::string_view character);

void append_utf8(uint32_t point, std::string& out);

// White_Space of Unicode.
bool is_white_space(uint32_t point);

// Bytes to text, piece by piece: holds back the bytes of a character until it is whole.
class Utf8Stream {
 public:
  std::string push(std::string_view bytes);  // what became certain
  std::string finish();                      // the rest; incomplete characters become U+FFFD

 private:
  std::string pending_;
};

}  // namespace fovea
