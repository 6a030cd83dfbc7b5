// SPDX-License-Identifier: Apache-2.0
// The tree of PrefixCache. Each node is a page and is found by key. Two least-recently-used orders
// list the removable leaves and the snapshots of linear state.
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
    int64_t page = 0;  // 0 for a root
    int64_t last_use = 0;
    int64_t state_use = 0;
    int32_t parent = -1;
    int32_t children = 0;
    int32_t pins = 0;
    int32_t state_slot = -1;
  };

  // Computes the key of a page. Keys may collide, which reduces reuse but never affects
  // correctness.
  using PageKey = PrefixKey (*)(Sha256&, const PrefixKey& parent, std::span<const int32_t> tokens);

  explicit PrefixTree(int32_t page_size, PageKey page_key = hash_page)
      : page_size_(page_size), page_key_(page_key) {}

  // Returns -1 if there is none.
  int32_t find_root(const PrefixDomain& domain);
  int32_t find_child(int32_t parent, std::span<const int32_t> tokens);
  // Returns the existing root or a new one, or -1 if another domain has the same key.
  int32_t add_root(const PrefixDomain& domain);
  // Adds a child that find_child() did not find. Returns -1 as add_root() does.
  int32_t add_child(int32_t parent, std::span<const int32_t> tokens, int64_t page);
  // Removes a leaf, and its root if that has become empty.
  void remove_leaf(int32_t index);

  const Node& node(int32_t index) const { return nodes_[static_cast<size_t>(index)]; }
  // Marks the path to `index` as used now.
  void touch(int32_t index);
  void pin(int32_t index, int32_t change);
  void set_state(int32_t index, int32_t slot);  // -1 removes it
  void touch_state(int32_t index);              // the node must have a state

  // (time of last use, node), oldest first
  using Order = std::set<std::pair<int64_t, int32_t>>;

  // The leaves that may be removed: neither pinned nor roots.
  const Order& leaves() const { return leaves_; }
  const Order& states() const { return states_; }
  // Visits every node, so that the owner can release what the nodes hold.
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
  // Functions that change the tree allocate first, so that a failed allocation changes nothing.
  // `entry` is the entry of a leaf; list() inserts it if the node is one.
  static Order::node_type new_entry();
  void list(int32_t index, Order::node_type entry);

  int32_t page_size_;
  PageKey page_key_;
  int64_t now_ = 0;
  Sha256 hash_;
  std::vector<Node> nodes_;
  std::vector<int32_t> tokens_;  // [nodes, page_size]
  std::vector<int32_t> unused_;  // free nodes
  std::unordered_map<PrefixKey, int32_t, KeyHash> by_key_;
  std::unordered_map<int32_t, std::string> domains_;  // serialised domain of each root
  Order leaves_;
  Order states_;
};

}  // namespace fovea
