// SPDX-License-Identifier: Apache-2.0
#include "core/quote.h"

#include <fmt/core.h>

#include <cstddef>
#include <cstdint>

namespace fovea {
namespace {

constexpr size_t kLongest = 200;

// One UTF-8 character, or one byte that is not part of any.
struct Character {
  uint32_t point = 0;
  size_t bytes = 1;
  bool is_valid = false;
};

Character first_character(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {lead, 1, true};
  const size_t bytes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < bytes) return {lead, 1, false};
  uint32_t point = lead & (0x7Fu >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return {lead, 1, false};
    point = point << 6 | (byte(i) & 0x3Fu);
  }
  constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = point >= 0xD800 && point <= 0xDFFF;
  if (point < kSmallest[bytes] || point > 0x10FFFF || is_surrogate) return {lead, 1, false};
  return {point, bytes, true};
}

// Returns true for control characters, line separators and marks that reorder the text around them.
bool is_harmful(uint32_t point) {
  const auto within = [&](uint32_t low, uint32_t high) { return point >= low && point <= high; };
  return point < 0x20 || within(0x7F, 0x9F) || within(0x200E, 0x200F) || within(0x2028, 0x202E) ||
         within(0x2066, 0x2069) || point == 0xFEFF;
}

std::string escaped(std::string_view text, size_t longest, bool in_quotes) {
  std::string shown;
  size_t at = 0;
  while (at < text.size()) {
    const Character next = first_character(text.substr(at));
    if (at + next.bytes > longest) break;
    if (!next.is_valid) {
      shown += fmt::format("\\x{:02x}", next.point);
    } else if (is_harmful(next.point)) {
      shown += next.point < 0x80 ? fmt::format("\\x{:02x}", next.point)
                                 : fmt::format("\\u{:04x}", next.point);
    } else {
      if (in_quotes && (next.point == '\'' || next.point == '\\')) shown += '\\';
      shown += text.substr(at, next.bytes);
    }
    at += next.bytes;
  }
  if (in_quotes) shown = "'" + shown + "'";
  if (at < text.size()) shown += fmt::format("... ({} bytes)", text.size());
  return shown;
}

}  // namespace

std::string printable(std::string_view text) { return escaped(text, text.size(), false); }

std::string clipped(std::string_view text) { return escaped(text, kLongest, false); }

std::string quote(std::string_view text) { return escaped(text, kLongest, true); }

}  // namespace fovea
