// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/grammar/token_trie.h"

#include <algorithm>

namespace fovea::grammar {

TokenTrie::TokenTrie(const std::vector<std::string>& bytes) : vocabulary_(bytes.size()) {
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (!bytes[i].empty() && bytes[i].size() <= kMaxTokenBytes)
      tokens_.push_back(static_cast<int32_t>(i));
  }
  const auto text = [&](int32_t token) -> const std::string& {
    return bytes[static_cast<size_t>(token)];
  };
  std::ranges::stable_sort(tokens_, [&](int32_t a, int32_t b) { return text(a) < text(b); });
  nodes_.push_back({});
  std::vector<size_t> open = {0};  // the nodes on the way to the last one
  const auto close_to = [&](size_t depth) {
    for (; open.size() > depth + 1; open.pop_back())
      nodes_[open.back()].end = static_cast<uint32_t>(nodes_.size());
  };
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const std::string& now = text(tokens_[i]);
    const std::string empty;
    const std::string& before = i > 0 ? text(tokens_[i - 1]) : empty;
    const auto differ = std::ranges::mismatch(now, before);
    const auto shared = static_cast<size_t>(differ.in1 - now.begin());
    close_to(shared);
    for (size_t depth = shared; depth < now.size(); ++depth) {
      open.push_back(nodes_.size());
      nodes_.push_back({static_cast<uint8_t>(now[depth]), static_cast<uint16_t>(depth + 1), 0,
                        static_cast<uint32_t>(i), 0});
    }
    ++nodes_[open.back()].count;
  }
  close_to(0);
  nodes_[0].end = static_cast<uint32_t>(nodes_.size());
}

}  // namespace fovea::grammar
