// SPDX-License-Identifier: Apache-2.0
#include "engine/graph_sizes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace fovea {
namespace {

TEST(GraphSizes, ArePowersOfTwoUpTo8ThenMultiplesOf8) {
  EXPECT_EQ(graph_sizes(1), (std::vector<int32_t>{1}));
  EXPECT_EQ(graph_sizes(6), (std::vector<int32_t>{1, 2, 4, 6}));
  EXPECT_EQ(graph_sizes(8), (std::vector<int32_t>{1, 2, 4, 8}));
  EXPECT_EQ(graph_sizes(33), (std::vector<int32_t>{1, 2, 4, 8, 16, 24, 32, 33}));
  EXPECT_EQ(graph_sizes(256).size(), 3u + 32u);
}

TEST(GraphSizes, TheSmallestThatHoldsTheRequestsIsUsed) {
  for (const int32_t most : {1, 5, 8, 17, 64, 255}) {
    const std::vector<int32_t> sizes = graph_sizes(most);
    for (int32_t requests = 1; requests <= most; ++requests) {
      EXPECT_EQ(graph_size(requests, most), *std::ranges::lower_bound(sizes, requests))
          << requests << " of at most " << most;
    }
  }
}

TEST(GraphContexts, AreShortForFewRequestsAndAlwaysTheLongest) {
  EXPECT_EQ(graph_contexts(1, 100), (std::vector<int32_t>{100}));
  EXPECT_EQ(graph_contexts(1, 2048), (std::vector<int32_t>{2048}));
  EXPECT_EQ(graph_contexts(2, 2049), (std::vector<int32_t>{2048, 2049}));
  EXPECT_EQ(graph_contexts(8, 131072), (std::vector<int32_t>{2048, 4096, 131072}));
  EXPECT_EQ(graph_contexts(16, 131072), (std::vector<int32_t>{131072}));
}

TEST(GraphContexts, TheShortestThatHoldsTheKeysIsUsed) {
  for (const int32_t requests : {1, 8, 16}) {
    for (const int32_t longest : {2000, 3000, 5000}) {
      const std::vector<int32_t> contexts = graph_contexts(requests, longest);
      for (int32_t kv_len = 1; kv_len <= longest; ++kv_len) {
        ASSERT_EQ(graph_context(requests, kv_len, longest),
                  *std::ranges::lower_bound(contexts, kv_len))
            << requests << " requests, " << kv_len << " of at most " << longest;
      }
    }
  }
}

}  // namespace
}  // namespace fovea
