// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/byte_trie.h"

#include <algorithm>

namespace fovea {

ByteTrie::ByteTrie(std::vector<Key> keys) {
  std::stable_sort(keys.begin(), keys.end(),
                   [](const Key& a, const Key& b) { return a.text < b.text; });
  // The sorted keys below a node of the current level.
  struct Range {
    size_t begin = 0;
    size_t end = 0;
  };
  std::vector<Range> level = {{0, keys.size()}}, next_level;
  first_children_.clear();
  for (size_t depth = 0; !level.empty(); ++depth, level.swap(next_level)) {
    next_level.clear();
    for (const Range& range : level) {
      const auto node = static_cast<int32_t>(first_children_.size());
      first_children_.push_back(nodes());
      size_t at = range.begin;
      // Keys that end at this node come first.
      for (; at < range.end && keys[at].text.size() == depth; ++at) values_[node] = keys[at].value;
      while (at < range.end) {
        const char byte = keys[at].text[depth];
        const size_t begin = at;
        while (at < range.end && keys[at].text[depth] == byte) ++at;
        bytes_.push_back(static_cast<uint8_t>(byte));
        values_.push_back(kNone);
        next_level.push_back({begin, at});
      }
    }
  }
  first_children_.push_back(nodes());
  for (int32_t node = first_child(kRoot); node < first_child(kRoot + 1); ++node) {
    root_children_[bytes_[node]] = node;
  }
}

int32_t ByteTrie::search(int32_t node, char byte) const {
  const auto wanted = static_cast<uint8_t>(byte);
  const auto begin = bytes_.begin() + first_children_[node];
  const auto end = bytes_.begin() + first_children_[node + 1];
  const auto found = std::lower_bound(begin, end, wanted);
  if (found == end || *found != wanted) return kNone;
  return static_cast<int32_t>(found - bytes_.begin());
}

}  // namespace fovea
