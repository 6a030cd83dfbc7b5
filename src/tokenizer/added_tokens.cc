// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/added_tokens.h"

#include <algorithm>
#include <utility>

#include "tokenizer/pattern.h"
#include "tokenizer/utf8.h"

namespace fovea {
namespace {

// Returns the begin of the character before `at`.
size_t character_before(std::string_view text, size_t at) {
  size_t begin = at - 1;
  while ((static_cast<uint8_t>(text[begin]) & 0xC0) == 0x80) --begin;
  return begin;
}

bool word_ends_at(std::string_view text, size_t at) {
  if (at == 0) return false;
  const size_t begin = character_before(text, at);
  return is_word_character(text.substr(begin, at - begin));
}

bool word_starts_at(std::string_view text, size_t at) {
  return at < text.size() && is_word_character(text.substr(at, next_utf8(text.substr(at)).bytes));
}

// Returns the begin of the white space that ends at `end`, but at least `limit`.
size_t white_space_begin(std::string_view text, size_t end, size_t limit) {
  while (end > limit) {
    const size_t begin = character_before(text, end);
    if (!is_white_space(code_point(text.substr(begin, end - begin)))) break;
    end = begin;
  }
  return std::max(end, limit);
}

// Returns the end of the white space that begins at `at`.
size_t white_space_end(std::string_view text, size_t at) {
  while (at < text.size()) {
    const size_t bytes = next_utf8(text.substr(at)).bytes;
    if (!is_white_space(code_point(text.substr(at, bytes)))) break;
    at += bytes;
  }
  return at;
}

}  // namespace

AddedTokenFinder::AddedTokenFinder(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::vector<ByteTrie::Key> keys;
  keys.reserve(tokens_.size());
  for (const AddedToken& token : tokens_) {
    keys.push_back({token.content, static_cast<int32_t>(keys.size())});
  }
  trie_ = ByteTrie(std::move(keys));
  const auto nodes = static_cast<size_t>(trie_.nodes());
  fallbacks_.assign(nodes, ByteTrie::kRoot);
  depths_.assign(nodes, 0);
  longest_.assign(nodes, kNone);
  // Nodes are ordered by depth, so a fallback is complete before it is used.
  for (int32_t parent = 0; parent < trie_.nodes(); ++parent) {
    for (int32_t node = trie_.first_child(parent); node < trie_.first_child(parent + 1); ++node) {
      depths_[node] = depths_[parent] + 1;
      if (parent != ByteTrie::kRoot) {
        fallbacks_[node] = next_node(fallbacks_[parent], trie_.byte(node));
      }
      longest_[node] =
          trie_.value(node) != ByteTrie::kNone ? trie_.value(node) : longest_[fallbacks_[node]];
    }
  }
}

int32_t AddedTokenFinder::next_node(int32_t node, char byte) const {
  while (true) {
    const int32_t child = trie_.child(node, byte);
    if (child != ByteTrie::kNone) return child;
    if (node == ByteTrie::kRoot) return node;
    node = fallbacks_[node];
  }
}

AddedTokenFinder::Match AddedTokenFinder::find(std::string_view text, size_t from) const {
  Match best;
  int32_t node = ByteTrie::kRoot;
  for (size_t at = from; at < text.size(); ++at) {
    node = next_node(node, text[at]);
    const size_t end = at + 1;
    const size_t begin = end - static_cast<size_t>(depths_[node]);
    // The current match candidate begins after the best match.
    if (best.index != kNone && begin > best.begin) break;
    const int32_t index = longest_[node];
    if (index == kNone) continue;
    const size_t start = end - tokens_[index].content.size();
    if (best.index == kNone || start <= best.begin) best = {start, end, index};
  }
  return best;
}

std::vector<TextPart> AddedTokenFinder::split(std::string_view text) const {
  std::vector<TextPart> parts;
  size_t done = 0;         // end of the last part
  size_t known_space = 0;  // end of the white space that rstrip has consumed
  size_t known_from = 0;   // ... and its begin
  for (size_t at = 0; at < text.size() && !tokens_.empty();) {
    const Match match = find(text, at);
    if (match.index == kNone) break;
    at = match.end;
    const AddedToken& token = tokens_[match.index];
    if (token.single_word && (word_ends_at(text, match.begin) || word_starts_at(text, match.end))) {
      continue;
    }
    size_t begin = match.begin;
    size_t end = match.end;
    if (token.lstrip) begin = white_space_begin(text, begin, std::min(done, begin));
    if (token.rstrip) {
      if (end < known_from || end > known_space) {
        known_from = end;
        known_space = white_space_end(text, end);
      }
      end = known_space;
    }
    if (done < begin) parts.push_back({done, begin, kNone});
    parts.push_back({begin, end, token.id});
    done = end;
  }
  if (done < text.size()) parts.push_back({done, text.size(), kNone});
  return parts;
}

}  // namespace fovea
