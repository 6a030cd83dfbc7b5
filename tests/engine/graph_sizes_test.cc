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

TEST(GraphWidths, AreOneAndPowersOfTwoOfDraftsAfterIt) {
  EXPECT_EQ(graph_widths(1), (std::vector<int32_t>{1}));
  EXPECT_EQ(graph_widths(2), (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(graph_widths(4), (std::vector<int32_t>{1, 2, 3, 4}));
  EXPECT_EQ(graph_widths(8), (std::vector<int32_t>{1, 2, 3, 5, 8}));
  for (const int32_t max_width : {1, 2, 5, 8, 64}) {
    const std::vector<int32_t> widths = graph_widths(max_width);
    for (int32_t tokens = 1; tokens <= max_width; ++tokens) {
      EXPECT_EQ(graph_width(tokens, max_width), *std::ranges::lower_bound(widths, tokens))
          << tokens << " of at most " << max_width;
    }
  }
}

// All graphs with drafts fit the rows of logits that are reserved for them.
TEST(GraphWidths, GraphsWithDraftsAreLimitedByRequestsAndTokens) {
  EXPECT_TRUE(has_graph(256, 1, 256));
  EXPECT_FALSE(has_graph(256, 1, 255));
  EXPECT_TRUE(has_graph(64, 8, 512));
  EXPECT_FALSE(has_graph(72, 2, 8192));
  EXPECT_FALSE(has_graph(64, 9, 8192));
  EXPECT_FALSE(has_graph(4, 5, 19));
  for (const int32_t max_requests : {1, 7, 64, 256}) {
    EXPECT_EQ(verify_rows(max_requests, 1), 0);
    for (const int32_t max_width : {2, 5, 64}) {
      for (const int32_t requests : graph_sizes(max_requests)) {
        for (const int32_t width : graph_widths(max_width)) {
          if (width == 1 || !has_graph(requests, width, 8192)) continue;
          EXPECT_LE(requests * width, verify_rows(max_requests, max_width));
        }
      }
    }
  }
}

TEST(GraphChunks, AreTheSizesThatAPassCanHave) {
  using Sizes = std::vector<ChunkSize>;
  EXPECT_EQ(chunk_sizes(1, 32), (Sizes{{1, 16}, {1, 32}}));
  EXPECT_EQ(chunk_sizes(4, 100), (Sizes{{1, 16},
                                        {1, 32},
                                        {1, 64},
                                        {1, 96},
                                        {1, 100},
                                        {4, 16},
                                        {4, 32},
                                        {4, 64},
                                        {4, 96},
                                        {4, 100}}));
  EXPECT_EQ(chunk_sizes(8, 15), (Sizes{{1, 15}, {8, 15}}));
  EXPECT_EQ(chunk_sizes(64, 8192).back(), (ChunkSize{64, 128}));
  EXPECT_EQ(chunk_sizes(256, 8192).size(), 5u + 5u + 5u + 3u);
}

TEST(GraphChunks, TheSmallestThatHoldsThePassIsUsed) {
  for (const int32_t max_requests : {1, 5, 8, 20, 33, 256}) {
    for (const int32_t max_tokens : {5, 16, 60, 100, 8192}) {
      const std::vector<ChunkSize> sizes = chunk_sizes(max_requests, max_tokens);
      for (int32_t requests = 1; requests <= max_requests; ++requests) {
        for (int32_t tokens = requests; tokens <= 140; ++tokens) {
          const auto found = std::ranges::find_if(sizes, [&](const ChunkSize& size) {
            return size.requests >= requests && size.tokens >= tokens;
          });
          EXPECT_EQ(chunk_size(requests, tokens, max_requests, max_tokens),
                    found == sizes.end() ? ChunkSize{} : *found)
              << requests << " of " << max_requests << ", " << tokens << " of " << max_tokens;
        }
      }
    }
  }
}

}  // namespace
}  // namespace fovea
