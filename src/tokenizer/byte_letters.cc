// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/byte_letters.h"

#include <array>
#include <cstdint>

#include "tokenizer/utf8.h"

namespace fovea {
namespace {

class ByteLetters {
 public:
  ByteLetters() {
    bytes_.fill(kNone);
    uint32_t next = 256;
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
      const uint32_t letter = printable ? byte : next++;
      bytes_[letter] = static_cast<int16_t>(byte);
      append_utf8(letter, letters_[byte]);
    }
  }

  std::string_view letter(char byte) const { return letters_[static_cast<uint8_t>(byte)]; }
  // Returns the byte that a letter represents, or kNone.
  int byte(uint32_t letter) const { return letter < bytes_.size() ? bytes_[letter] : kNone; }

  static constexpr int16_t kNone = -1;

 private:
  std::array<std::string, 256> letters_;
  std::array<int16_t, 256 + 68> bytes_ = {};  // per code point
};

const ByteLetters& byte_letters() {
  static const ByteLetters letters;
  return letters;
}

}  // namespace

std::string to_byte_letters(std::string_view bytes) {
  const ByteLetters& table = byte_letters();
  std::string out;
  out.reserve(bytes.size() + bytes.size() / 4);
  for (const char byte : bytes) out += table.letter(byte);
  return out;
}

void append_letter_bytes(std::string_view token, std::string& bytes) {
  const ByteLetters& table = byte_letters();
  const size_t before = bytes.size();
  for (std::string_view rest = token; !rest.empty();) {
    const size_t length = next_utf8(rest).bytes;
    const int byte = table.byte(code_point(rest.substr(0, length)));
    if (byte == ByteLetters::kNone) {
      bytes.resize(before);
      bytes += token;
      return;
    }
    bytes += static_cast<char>(byte);
    rest.remove_prefix(length);
  }
}

}  // namespace fovea
