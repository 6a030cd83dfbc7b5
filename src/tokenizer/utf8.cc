// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/utf8.h"

#include <utility>

namespace fovea {
namespace {

constexpr uint8_t byte_at(std::string_view text, size_t i) { return static_cast<uint8_t>(text[i]); }

// Returns the bytes of a character that begins with `lead`, or 0 if none does.
constexpr size_t character_bytes(uint8_t lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return 2;
  if (lead >= 0xE0 && lead <= 0xEF) return 3;
  if (lead >= 0xF0 && lead <= 0xF4) return 4;
  return 0;
}

// Returns the range of valid second bytes. It is narrower than 80..BF if other bytes would make the
// character overlong, a surrogate or too large.
constexpr std::pair<uint8_t, uint8_t> second_byte_range(uint8_t lead) {
  switch (lead) {
    case 0xE0:
      return {0xA0, 0xBF};
    case 0xED:
      return {0x80, 0x9F};
    case 0xF0:
      return {0x90, 0xBF};
    case 0xF4:
      return {0x80, 0x8F};
    default:
      return {0x80, 0xBF};
  }
}

// Appends `text` with replacements. Returns the final bytes of a cut character, which are not
// appended.
size_t append_replaced(std::string_view text, std::string& out) {
  while (!text.empty()) {
    const Utf8Unit unit = next_utf8(text);
    if (unit.kind == Utf8Kind::cut) return unit.bytes;
    out += unit.kind == Utf8Kind::whole ? text.substr(0, unit.bytes) : kReplacementCharacter;
    text.remove_prefix(unit.bytes);
  }
  return 0;
}

}  // namespace

Utf8Unit next_utf8(std::string_view text) {
  const uint8_t lead = byte_at(text, 0);
  const size_t length = character_bytes(lead);
  if (length == 0) return {Utf8Kind::broken, 1};
  for (size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {Utf8Kind::cut, i};
    const auto [low, high] =
        i == 1 ? second_byte_range(lead) : std::pair<uint8_t, uint8_t>{0x80, 0xBF};
    if (byte_at(text, i) < low || byte_at(text, i) > high) return {Utf8Kind::broken, i};
  }
  return {Utf8Kind::whole, length};
}

std::string replace_broken_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  if (append_replaced(text, out) > 0) out += kReplacementCharacter;
  return out;
}

uint32_t code_point(std::string_view character) {
  const uint8_t lead = byte_at(character, 0);
  if (character.size() == 1) return lead;
  uint32_t value = lead & (0x7Fu >> character.size());
  for (size_t i = 1; i < character.size(); ++i) value = value << 6 | (byte_at(character, i) & 0x3F);
  return value;
}

void append_utf8(uint32_t point, std::string& out) {
  const auto tail = [&](uint32_t shift) {
    out += static_cast<char>(0x80 | ((point >> shift) & 0x3F));
  };
  if (point < 0x80) {
    out += static_cast<char>(point);
  } else if (point < 0x800) {
    out += static_cast<char>(0xC0 | point >> 6);
    tail(0);
  } else if (point < 0x10000) {
    out += static_cast<char>(0xE0 | point >> 12);
    tail(6);
    tail(0);
  } else {
    out += static_cast<char>(0xF0 | point >> 18);
    tail(12);
    tail(6);
    tail(0);
  }
}

bool is_white_space(uint32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

std::string Utf8Stream::push(std::string_view bytes) {
  pending_ += bytes;
  std::string out;
  const size_t cut = append_replaced(pending_, out);
  pending_.erase(0, pending_.size() - cut);
  return out;
}

std::string Utf8Stream::finish() { return replace_broken_utf8(std::exchange(pending_, {})); }

}  // namespace fovea
