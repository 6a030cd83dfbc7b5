// SPDX-License-Identifier: Apache-2.0
#include "kvcache/prefix_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace fovea {
namespace {

using Tokens = std::vector<int32_t>;

// The worst possible hash: one key for all pages.
PrefixKey same_key(Sha256&, const PrefixKey&, std::span<const int32_t>) { return {1}; }

// A weak hash: pages whose first tokens agree collide, whatever precedes them.
PrefixKey first_token_key(Sha256&, const PrefixKey&, std::span<const int32_t> tokens) {
  return {2, static_cast<uint8_t>(tokens[0])};
}

// Gives pages the key of another model's root.
PrefixKey root_key(Sha256& hash, const PrefixKey&, std::span<const int32_t>) {
  return hash_domain(hash, serialise({.model = "b"}));
}

TEST(PrefixTree, FindsWhatWasAdded) {
  PrefixTree tree(2);
  EXPECT_EQ(tree.find_root({.model = "a"}), -1);
  const int32_t root = tree.add_root({.model = "a"});
  EXPECT_EQ(tree.add_root({.model = "a"}), root);
  EXPECT_EQ(tree.find_root({.salt = "a"}), -1);
  const int32_t page = tree.add_child(root, Tokens{1, 2}, 7);
  EXPECT_EQ(tree.find_child(root, Tokens{1, 2}), page);
  EXPECT_EQ(tree.find_child(root, Tokens{1, 3}), -1);
  EXPECT_EQ(tree.find_child(page, Tokens{1, 2}), -1);
  tree.remove_leaf(page);
  EXPECT_EQ(tree.find_root({.model = "a"}), -1) << "an empty root goes with its last page";
}

TEST(PrefixTree, CollidingKeysNeverServeOtherTokens) {
  PrefixTree tree(2, same_key);
  const int32_t root = tree.add_root({.model = "a"});
  const int32_t other_root = tree.add_root({.model = "b"});
  const int32_t page = tree.add_child(root, Tokens{1, 2}, 7);
  ASSERT_GE(page, 0);
  EXPECT_EQ(tree.find_child(root, Tokens{1, 2}), page);
  EXPECT_EQ(tree.find_child(root, Tokens{1, 3}), -1) << "other tokens";
  EXPECT_EQ(tree.find_child(page, Tokens{1, 2}), -1) << "the same tokens further on";
  EXPECT_EQ(tree.find_child(other_root, Tokens{1, 2}), -1) << "the same tokens of another model";
  // The tree does not cache a page that it cannot distinguish from another.
  EXPECT_EQ(tree.add_child(root, Tokens{1, 3}, 8), -1);
  EXPECT_EQ(tree.find_child(root, Tokens{1, 2}), page);
}

TEST(PrefixTree, ARootThatCollidesWithAPageIsNotThere) {
  PrefixTree tree(1, root_key);
  const int32_t page = tree.add_child(tree.add_root({.model = "a"}), Tokens{1}, 7);
  EXPECT_EQ(tree.find_root({.model = "b"}), -1);
  EXPECT_EQ(tree.add_root({.model = "b"}), -1);
  tree.remove_leaf(page);
  EXPECT_GE(tree.add_root({.model = "b"}), 0);
}

// A reused node keeps nothing of its former use: neither the page of a root nor the root of a page.
TEST(PrefixTree, NodesAreReused) {
  PrefixTree tree(1);
  for (int round = 0; round < 3; ++round) {
    int32_t most = -1;
    std::vector<int32_t> pages;
    for (const char* model : {"a", "b", "c"}) {
      const int32_t root = tree.add_root({.model = model});
      pages.push_back(tree.add_child(root, Tokens{1}, 7));
      tree.touch(pages.back());
      tree.set_state(pages.back(), 3);
      most = std::max({most, root, pages.back()});
    }
    EXPECT_EQ(most, 5);
    EXPECT_EQ(tree.leaves().size(), 3u);
    std::rotate(pages.begin(), pages.begin() + round, pages.end());
    for (const int32_t page : pages) tree.remove_leaf(page);
    for (const char* model : {"a", "b", "c"}) EXPECT_EQ(tree.find_root({.model = model}), -1);
    // First two roots; one of them takes the place of a page.
    const int32_t x = tree.add_root({.model = "x"}), y = tree.add_root({.model = "y"});
    for (const int32_t root : {x, y}) {
      EXPECT_EQ(tree.node(root).parent, -1);
      EXPECT_EQ(tree.node(root).page, 0);
      const int32_t page = tree.add_child(root, Tokens{2}, 8);
      EXPECT_EQ(tree.node(page).state_slot, -1);
      tree.remove_leaf(page);
    }
    EXPECT_EQ(tree.find_root({.model = "x"}), -1);
    EXPECT_EQ(tree.find_root({.model = "y"}), -1);
    EXPECT_TRUE(tree.leaves().empty() && tree.states().empty());
  }
}

TEST(PrefixTree, ACollisionFreesItsKeyWithItsPage) {
  PrefixTree tree(2, first_token_key);
  const int32_t root = tree.add_root({});
  const int32_t first = tree.add_child(root, Tokens{1, 2}, 7);
  const int32_t second = tree.add_child(root, Tokens{2, 2}, 8);
  EXPECT_EQ(tree.add_child(second, Tokens{1, 2}, 9), -1);
  tree.remove_leaf(first);
  const int32_t third = tree.add_child(second, Tokens{1, 2}, 9);
  ASSERT_GE(third, 0);
  EXPECT_EQ(tree.find_child(root, Tokens{1, 2}), -1);
  EXPECT_EQ(tree.find_child(second, Tokens{1, 2}), third);
}

TEST(PrefixTree, OrdersHoldLeavesAndSnapshotsByUse) {
  PrefixTree tree(1);
  const int32_t root = tree.add_root({});
  const int32_t a = tree.add_child(root, Tokens{1}, 7);
  tree.touch(a);
  const int32_t b = tree.add_child(root, Tokens{2}, 8);
  tree.touch(b);
  ASSERT_EQ(tree.leaves().size(), 2u);
  EXPECT_EQ(tree.leaves().begin()->second, a);
  tree.touch(a);
  EXPECT_EQ(tree.leaves().begin()->second, b);
  tree.pin(b, 1);
  EXPECT_EQ(tree.leaves().begin()->second, a);
  const int32_t below = tree.add_child(a, Tokens{3}, 9);
  ASSERT_EQ(tree.leaves().size(), 1u) << "a has a child, b is pinned";
  EXPECT_EQ(tree.leaves().begin()->second, below);
  tree.set_state(b, 4);
  tree.set_state(a, 5);
  EXPECT_EQ(tree.states().begin()->second, b);
  tree.touch_state(b);
  EXPECT_EQ(tree.states().begin()->second, a);
  tree.remove_leaf(below);
  tree.remove_leaf(a);
  EXPECT_EQ(tree.states().size(), 1u) << "a snapshot is forgotten with its page";
}

}  // namespace
}  // namespace fovea
