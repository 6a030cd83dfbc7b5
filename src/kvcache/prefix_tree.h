// SPDX-License-Identifier: Apache-2.0
// The tree behind PrefixCache: a node per page, found by key, in two least-recently-used orders:
// leaves that may go, and snapshots of linear state.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/sha256.h"
#include "fovea/prefix_cache.h"
#include "kvcache/prefix_key.h"

namespace fovea {

class PrefixTree {
 public:
  struct Node {
    PrefixKey key{};
    int64_t page = 0;  // 0: a root
    int64_t last_use = 0;
    int64_t state_use = 0;
    int32_t parent = -1;
    int32_t children = 0;
    int32_t pins = 0;
    int32_t state_slot = -1;
  };

  // Keys of pages; keys may collide, which costs reuse, never correctness.
  using PageKey = PrefixKey (*)(Sha256&, const PrefixKey& parent, std::span<const int32_t> tokens);

  explicit PrefixTree(int32_t page_size, PageKey page_key = hash_page)
      : page_size_(page_size), page_key_(page_key) {}

  // -1 where there is none.
  int32_t find_root(const PrefixDomain& domain);
  int32_t find_child(int32_t parent, std::span<const int32_t> tokens);
  // The existing one, else a new one; -1 where the key belongs to something else.
  int32_t add_root(const PrefixDomain& domain);
  // Not there yet according to find_child. -1 as add_root.
  int32_t add_child(int32_t parent, std::span<const int32_t> tokens, int64_t page);
  // A leaf, and after it a root that has become empty.
  void remove_leaf(int32_t index);

  const Node& node(int32_t index) const { return nodes_[static_cast<size_t>(index)]; }
  // The path to `index` counts as used now.
  void touch(int32_t index);
  void pin(int32_t index, int32_t change);
  void set_state(int32_t index, int32_t slot);  // -1: none
  void touch_state(int32_t index);              // of a node that has one

  // (time of last use, node), oldest first.
  using Order = std::set<std::pair<int64_t, int32_t>>;
  const Order& leaves() const { return leaves_; }  // no children, not pinned, not roots
  const Order& states() const { return states_; }
  // Every node, for its owner to let go of what they hold.
  template <typename Visit>
  void visit_all(Visit visit) const {
    for (const auto& [key, index] : by_key_) visit(node(index));
  }

 private:
  struct KeyHash {
    size_t operator()(const PrefixKey& key) const;
  };

  Node& at(int32_t index) { return nodes_[static_cast<size_t>(index)]; }
  int32_t add(const PrefixKey& key);
  void remove(int32_t index);
  bool is_listed(const Node& node) const {
    return node.page != 0 && node.children == 0 && node.pins == 0;
  }
  // What changes the tree takes its memory first: where that fails, nothing has changed. An entry
  // is that of a leaf; list() puts it there if the node is one.
  static Order::node_type new_entry();
  void list(int32_t index, Order::node_type entry);

  int32_t page_size_;
  PageKey page_key_;
  int64_t now_ = 0;
  Sha256 hash_;
  std::vector<Node> nodes_;
  std::vector<int32_t> tokens_;  // [nodes, page_size]
  std::vector<int32_t> unused_;  // nodes to use again
  std::unordered_map<PrefixKey, int32_t, KeyHash> by_key_;
  std::unordered_map<int32_t, std::string> domains_;  // of the roots, serialised
  Order leaves_;
  Order states_;
};

}  // namespace fovea
