// SPDX-License-Identifier: Apache-2.0
// Every head and column belongs to the right ranks, for all numbers of heads and ranks.
#include "fovea/tensor_parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "support/expect_error.h"

namespace fovea {
namespace {

using test::expect_invalid;

TEST(ShardRange, DividesAnyCountInOrder) {
  for (int64_t count = 0; count <= 40; ++count) {
    for (int ranks = 1; ranks <= 9; ++ranks) {
      int64_t end = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const ShardRange range = shard_range(count, ranks, rank);
        EXPECT_EQ(range.begin, end);
        EXPECT_GE(range.count, count / ranks);
        EXPECT_LE(range.count, count / ranks + 1);
        end += range.count;
      }
      EXPECT_EQ(end, count);
    }
  }
  constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
  const ShardRange last = shard_range(kLargest, 1000, 999);
  EXPECT_EQ(last.begin + last.count, kLargest);
}

// By definition q head h reads kv head h / (q_heads / kv_heads). The shard must do the same with
// its own numbering.
TEST(ShardHeads, EveryQHeadKeepsItsKvHead) {
  int divided = 0;
  for (int32_t kv_heads = 1; kv_heads <= 16; ++kv_heads) {
    for (int32_t group = 1; group <= 16; ++group) {
      const int32_t q_heads = kv_heads * group;
      for (const int ranks : rank_counts(q_heads, kv_heads)) {
        std::vector<int> owners(static_cast<size_t>(q_heads));
        std::vector<int> copies(static_cast<size_t>(kv_heads));
        for (int rank = 0; rank < ranks; ++rank) {
          const HeadShard shard = shard_heads(q_heads, kv_heads, ranks, rank);
          ASSERT_EQ(shard.q_heads % shard.kv_heads, 0);
          const int32_t local_group = shard.q_heads / shard.kv_heads;
          for (int32_t h = 0; h < shard.q_heads; ++h) {
            ++owners[static_cast<size_t>(shard.q_begin + h)];
            EXPECT_EQ(shard.kv_begin + h / local_group, (shard.q_begin + h) / group);
          }
          for (int32_t h = 0; h < shard.kv_heads; ++h) {
            ++copies[static_cast<size_t>(shard.kv_begin + h)];
          }
          EXPECT_EQ(shard.replicas, std::max(1, ranks / kv_heads));
        }
        EXPECT_EQ(owners, std::vector<int>(owners.size(), 1));
        EXPECT_EQ(copies, std::vector<int>(copies.size(), std::max(1, ranks / kv_heads)));
        ++divided;
      }
    }
  }
  EXPECT_GT(divided, 500);
}

TEST(ShardHeads, KnownModels) {
  EXPECT_EQ(rank_counts(32, 8), (std::vector<int>{1, 2, 4, 8, 16, 32}));
  EXPECT_EQ(rank_counts(28, 4), (std::vector<int>{1, 2, 4, 28}));
  EXPECT_EQ(rank_counts(12, 3), (std::vector<int>{1, 3, 6, 12}));
  const HeadShard mla = shard_heads(128, 1, 8, 5);
  EXPECT_EQ(mla.q_begin, 80);
  EXPECT_EQ(mla.q_heads, 16);
  EXPECT_EQ(mla.kv_begin, 0);
  EXPECT_EQ(mla.kv_heads, 1);
  EXPECT_EQ(mla.replicas, 8);
}

TEST(ShardHeads, NamesTheArgument) {
  expect_invalid("ranks is 3, 32 q heads and 8 kv heads can be divided among 1, 2, 4, 8, 16, 32",
                 [] { shard_heads(32, 8, 3, 0); });
  expect_invalid("ranks is 64", [] { shard_heads(32, 8, 64, 0); });
  expect_invalid("rank is 2, must be in [0, 2)", [] { shard_heads(32, 8, 2, 2); });
  expect_invalid("kv_heads is 0", [] { shard_heads(32, 0, 1, 0); });
  expect_invalid("q_heads is 30, must be a positive multiple of kv_heads, 8",
                 [] { shard_heads(30, 8, 1, 0); });
  expect_invalid("count is -1", [] { shard_range(-1, 1, 0); });
  expect_invalid("ranks is 0", [] { shard_range(1, 0, 0); });
}

}  // namespace
}  // namespace fovea
