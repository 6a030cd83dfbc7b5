// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/added_tokens.h"

#include <algorithm>

#include "tokenizer/utf8.h"

namespace fovea {
namespace {

// White_Space of Unicode.
bool is_white_space(uint32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

size_t white_space_at_start(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const size_t bytes = next_utf8(text.substr(at)).bytes;
    if (!is_white_space(code_point(text.substr(at, bytes)))) break;
    at += bytes;
  }
  return at;
}

// Where the white space at the end of `text` begins.
size_t white_space_at_end(std::string_view text) {
  size_t at = text.size();
  while (at > 0) {
    size_t begin = at - 1;
    while ((static_cast<uint8_t>(text[begin]) & 0xC0) == 0x80) --begin;
    if (!is_white_space(code_point(text.substr(begin, at - begin)))) break;
    at = begin;
  }
  return at;
}

uint64_t edge(int32_t node, char byte) {
  return static_cast<uint64_t>(node) << 8 | static_cast<uint8_t>(byte);
}

}  // namespace

void AddedTokenFinder::add(const AddedToken& token) {
  int32_t node = 0;
  for (const char byte : token.content) {
    const auto next = static_cast<int32_t>(node_tokens_.size());
    const auto [child, is_new] = children_.emplace(edge(node, byte), next);
    if (is_new) node_tokens_.push_back(kNone);
    node = child->second;
  }
  node_tokens_[node] = static_cast<int32_t>(tokens_.size());
  tokens_.push_back(token);
}

int32_t AddedTokenFinder::longest_at(std::string_view text) const {
  int32_t longest = kNone;
  int32_t node = 0;
  for (const char byte : text) {
    const auto child = children_.find(edge(node, byte));
    if (child == children_.end()) break;
    node = child->second;
    if (node_tokens_[node] != kNone) longest = node_tokens_[node];
  }
  return longest;
}

std::vector<TextPart> AddedTokenFinder::split(std::string_view text) const {
  std::vector<TextPart> parts;
  size_t done = 0;
  for (size_t at = 0; at < text.size() && !tokens_.empty();) {
    const int32_t index = longest_at(text.substr(at));
    if (index == kNone) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[index];
    size_t begin = at;
    at += token.content.size();
    size_t end = at;
    if (token.lstrip) begin = white_space_at_end(text.substr(0, begin));
    if (token.rstrip) end += white_space_at_start(text.substr(end));
    begin = std::max(begin, done);
    if (begin > done) parts.push_back({text.substr(done, begin - done), kNone});
    parts.push_back({text.substr(begin, end - begin), token.id});
    done = end;
  }
  if (done < text.size()) parts.push_back({text.substr(done), kNone});
  return parts;
}

}  // namespace fovea
