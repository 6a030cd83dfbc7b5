// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/charsmap.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "tokenizer/utf8.h"

namespace fovea {
namespace {

constexpr size_t kLongestGrapheme = 5;  // in bytes

// Returns the number of bytes of the first grapheme cluster.
size_t next_grapheme(std::string_view text) {
  size_t end = next_utf8(text).bytes;
  int32_t state = 0;
  auto before = static_cast<int32_t>(code_point(text.substr(0, end)));
  while (end < text.size()) {
    const size_t bytes = next_utf8(text.substr(end)).bytes;
    const auto point = static_cast<int32_t>(code_point(text.substr(end, bytes)));
    if (utf8proc_grapheme_break_stateful(before, point, &state)) break;
    before = point;
    end += bytes;
  }
  return end;
}

// Fields of a unit in a double-array trie (Darts-clone).
uint32_t offset_of(uint32_t unit) { return (unit >> 10) << ((unit & (1u << 9)) >> 6); }
uint32_t label_of(uint32_t unit) { return unit & (1u << 31 | 0xFF); }
bool has_leaf(uint32_t unit) { return (unit >> 8 & 1) != 0; }
uint32_t value_of(uint32_t unit) { return unit & ((1u << 31) - 1); }

}  // namespace

Charsmap::Charsmap(std::string_view bytes, std::string_view name, CharsmapMatch match)
    : match_(match) {
  uint32_t trie_bytes = 0;
  if (bytes.size() >= sizeof(trie_bytes))
    std::memcpy(&trie_bytes, bytes.data(), sizeof(trie_bytes));
  const size_t rest = bytes.size() - std::min(bytes.size(), sizeof(trie_bytes));
  if (trie_bytes == 0 || trie_bytes > rest || trie_bytes % sizeof(uint32_t) != 0) {
    fail(ErrorCode::corrupt_file,
         "{}: a precompiled_charsmap of {} bytes has a trie of {}, must be a multiple of 4 within",
         name, bytes.size(), trie_bytes);
  }
  trie_.resize(trie_bytes / sizeof(uint32_t));
  std::memcpy(trie_.data(), bytes.data() + sizeof(trie_bytes), trie_bytes);
  replacements_ = bytes.substr(sizeof(trie_bytes) + trie_bytes);
  if (replace_broken_utf8(replacements_) != replacements_) {
    fail(ErrorCode::corrupt_file, "{}: the replacements of precompiled_charsmap are not UTF-8",
         name);
  }
}

std::optional<Charsmap::Replacement> Charsmap::replacement(std::string_view text) const {
  std::optional<Replacement> found;
  size_t node = offset_of(trie_[0]);
  for (size_t at = 0; at < text.size(); ++at) {
    const auto byte = static_cast<uint8_t>(text[at]);
    node ^= byte;
    if (byte == 0 || node >= trie_.size() || label_of(trie_[node]) != byte) break;
    const uint32_t unit = trie_[node];
    node ^= offset_of(unit);
    if (!has_leaf(unit)) continue;
    if (node >= trie_.size() || value_of(trie_[node]) > replacements_.size()) break;
    const std::string_view from = std::string_view(replacements_).substr(value_of(trie_[node]));
    found = {at + 1, from.substr(0, std::min(from.find('\0'), from.size()))};
    if (match_ == CharsmapMatch::graphemes) break;
  }
  return found;
}

void Charsmap::apply_to_grapheme(std::string_view grapheme, std::string& out) const {
  if (grapheme.size() <= kLongestGrapheme) {
    if (const auto whole = replacement(grapheme)) {
      out += whole->text;
      return;
    }
  }
  while (!grapheme.empty()) {
    const std::string_view character = grapheme.substr(0, next_utf8(grapheme).bytes);
    grapheme.remove_prefix(character.size());
    const auto known = replacement(character);
    out += known ? known->text : character;
  }
}

std::string Charsmap::apply(std::string_view text) const {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    if (match_ == CharsmapMatch::graphemes) {
      const std::string_view grapheme = text.substr(0, next_grapheme(text));
      text.remove_prefix(grapheme.size());
      apply_to_grapheme(grapheme, out);
      continue;
    }
    const auto known = replacement(text);
    const size_t bytes = known ? known->bytes : next_utf8(text).bytes;
    out += known ? known->text : text.substr(0, bytes);
    text.remove_prefix(bytes);
  }
  // Repairs replacements that begin inside a character and matches that end inside one.
  return replace_broken_utf8(out);
}

std::string decode_base64(std::string_view text, std::string_view name) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  while (text.ends_with('=')) text.remove_suffix(1);
  std::string out;
  out.reserve(text.size() / 4 * 3 + 3);
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    const size_t digit = kDigits.find(c);
    if (digit == kDigits.npos) {
      fail(ErrorCode::corrupt_file, "{}: precompiled_charsmap is not base64", name);
    }
    bits = bits << 6 | static_cast<uint32_t>(digit);
    count += 6;
    if (count < 8) continue;
    count -= 8;
    out += static_cast<char>(bits >> count & 0xFF);
  }
  return out;
}

}  // namespace fovea
