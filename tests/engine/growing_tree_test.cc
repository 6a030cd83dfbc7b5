// SPDX-License-Identifier: Apache-2.0
#include "engine/growing_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "support/cases.h"

namespace fovea {
namespace {

SampledToken drawn(int32_t token, const std::vector<TokenLogprob>& top) {
  SampledToken result;
  result.token = token;
  result.top = top;
  return result;
}

TEST(GrowingTree, KeepsTheLikeliestPaths) {
  GrowingTree tree(9, 3, 2, 63);
  EXPECT_EQ(std::vector(tree.tokens().begin(), tree.tokens().end()), (std::vector<int32_t>{9}));
  tree.add_children(0, drawn(1, {{1, -0.5f}, {2, -1.0f}}));
  ASSERT_TRUE(tree.choose());
  EXPECT_EQ(tree.chosen(), 2);
  EXPECT_EQ(std::vector(tree.parents().begin(), tree.parents().end()),
            (std::vector<int32_t>{-1, 0, 0}));
  tree.add_children(1, drawn(4, {{3, -2.0f}, {4, -2.1f}}));
  tree.add_children(2, drawn(5, {{5, -0.1f}, {6, -3.0f}}));
  const DraftTree drafts = tree.finish();
  EXPECT_EQ(drafts.tokens, (std::vector<int32_t>{9, 1, 2, 5}));
  EXPECT_EQ(drafts.parents, (std::vector<int32_t>{-1, 0, 0, 2}));
  EXPECT_EQ(drafts.find(0, 2), 2);
  EXPECT_EQ(drafts.find(2, 5), 3);
  EXPECT_EQ(drafts.find(1, 5), -1);
}

TEST(GrowingTree, ADrawnTokenIsAsLikelyAsTheLikeliest) {
  GrowingTree tree(9, 2, 2, 63);
  tree.add_children(0, drawn(7, {{1, -0.5f}, {2, -1.0f}}));
  EXPECT_EQ(tree.finish().tokens, (std::vector<int32_t>{9, 7, 1}));
}

TEST(GrowingTree, TokensWithoutAChanceAreLeftOut) {
  GrowingTree tree(9, 4, 3, 63);
  const float never = -std::numeric_limits<float>::infinity();
  tree.add_children(0, drawn(1, {{1, 0.0f}, {2, never}, {3, never}}));
  EXPECT_EQ(tree.finish().tokens, (std::vector<int32_t>{9, 1}));
}

// Trees of random distributions: parents come first, scores descend, and no node has too many
// children or is computed twice.
TEST(GrowingTree, IsATreeOfTheBestNodes) {
  std::mt19937 random(3);
  for (int round = 0; round < 500 * test::test_scale(); ++round) {
    const auto wanted = static_cast<int32_t>(1 + random() % 63);
    const auto branches = static_cast<int32_t>(1 + random() % 8);
    const auto room = static_cast<int32_t>(1 + random() % 63);
    GrowingTree tree(0, wanted, branches, room);
    std::vector<double> score{0};  // by token: each draft has a token of its own
    do {
      const auto computed = static_cast<int32_t>(tree.tokens().size());
      ASSERT_LE(computed, 1 + std::min(wanted, room));
      ASSERT_LE(tree.chosen(), std::max(1, branches));
      for (int32_t place = computed - tree.chosen(); place < computed; ++place) {
        std::vector<TokenLogprob> top;
        float logprob = 0;
        for (int32_t i = 0; i < branches; ++i) {
          logprob -= 0.01f * static_cast<float>(random() % 100);
          top.push_back({static_cast<int32_t>(score.size()), logprob});
          score.push_back(score[static_cast<size_t>(tree.tokens()[static_cast<size_t>(place)])] +
                          static_cast<double>(logprob));
        }
        tree.add_children(place, drawn(top.front().token, top));
      }
    } while (tree.choose());
    const DraftTree drafts = tree.finish();
    ASSERT_LE(drafts.drafts(), wanted);
    std::vector<int32_t> children(drafts.tokens.size());
    std::vector<double> kept;
    for (int32_t node = 1; node <= drafts.drafts(); ++node) {
      ASSERT_LT(drafts.parent(node), node);
      ASSERT_LE(++children[static_cast<size_t>(drafts.parent(node))], branches);
      kept.push_back(score[static_cast<size_t>(drafts.tokens[static_cast<size_t>(node)])]);
    }
    EXPECT_TRUE(std::ranges::is_sorted(kept, std::greater()));
    std::ranges::sort(score, std::greater());
    for (size_t i = 0; i < kept.size(); ++i) ASSERT_EQ(kept[i], score[i + 1]) << "the best of all";
  }
}

}  // namespace
}  // namespace fovea
