// SPDX-License-Identifier: Apache-2.0
// A read-only trie over byte strings. Nodes are numbered level by level, so the children of a node
// are consecutive and sorted by byte.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace fovea {

class ByteTrie {
 public:
  static constexpr int32_t kNone = -1;
  static constexpr int32_t kRoot = 0;

  struct Key {
    std::string_view text;  // must not be empty
    int32_t value = 0;      // must be at least 0; the last of equal texts wins
  };

  ByteTrie() = default;
  // Takes time and memory in proportion to the bytes of all keys, plus the time to sort them.
  explicit ByteTrie(std::vector<Key> keys);

  int32_t nodes() const { return static_cast<int32_t>(bytes_.size()); }
  // Returns the child of `node` for `byte`, or kNone.
  int32_t child(int32_t node, char byte) const {
    if (node == kRoot) return root_children_[static_cast<uint8_t>(byte)];
    return search(node, byte);
  }
  // Returns the value of the key that ends at `node`, or kNone.
  int32_t value(int32_t node) const { return values_[node]; }
  // Returns the byte between `node` and its parent. The root has none.
  char byte(int32_t node) const { return static_cast<char>(bytes_[node]); }
  // Returns the first child of `node`; the children are [first_child(node), first_child(node + 1)).
  int32_t first_child(int32_t node) const { return first_children_[node]; }

 private:
  int32_t search(int32_t node, char byte) const;

  std::vector<uint8_t> bytes_ = {0};
  std::vector<int32_t> first_children_ = {1, 1};  // has one entry more than there are nodes
  std::vector<int32_t> values_ = {kNone};
  std::vector<int32_t> root_children_ = std::vector<int32_t>(256, kNone);
};

}  // namespace fovea
