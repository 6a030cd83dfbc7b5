// SPDX-License-Identifier: Apache-2.0
// Where the tokens of a request are, compared with counting them one by one.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "fovea/context_parallel.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using test::expect_invalid;

constexpr int32_t kPageSize = 16;

// All numbers of ranks with all interleaves that divide a page.
std::vector<ContextShards> all_shards() {
  std::vector<ContextShards> shards;
  for (int32_t ranks = 1; ranks <= 8; ++ranks) {
    for (const int32_t interleave : {1, 2, 4, 8, 16}) shards.push_back({ranks, interleave});
  }
  return shards;
}

TEST(ContextShards, LengthsCountTheTokensOfARank) {
  for (const ContextShards& shards : all_shards()) {
    std::vector<int64_t> counted(static_cast<size_t>(shards.ranks));
    for (int64_t length = 0; length <= 4097; ++length) {
      int64_t total = 0;
      for (int32_t rank = 0; rank < shards.ranks; ++rank) {
        const int64_t local = shards.local_length(length, rank);
        ASSERT_EQ(local, counted[static_cast<size_t>(rank)])
            << length << " tokens, rank " << rank << " of " << shards.ranks << ", interleave "
            << shards.interleave;
        if (length > 0) {
          ASSERT_EQ(shards.visible_length(length - 1, rank), local);
        }
        total += local;
      }
      ASSERT_EQ(total, length);
      ++counted[static_cast<size_t>(length / shards.interleave % shards.ranks)];
    }
  }
}

TEST(ContextShards, PositionsAndLocalIndicesAreInverse) {
  for (const ContextShards& shards : all_shards()) {
    for (int64_t position = 0; position < 2000; ++position) {
      const int32_t rank = shards.owner(position);
      const int64_t local = shards.local_index(position);
      ASSERT_EQ(shards.position(rank, local), position);
      ASSERT_EQ(shards.local_length(position, rank), local);
    }
  }
  constexpr ContextShards kShards{7, 16};
  constexpr int64_t kFar = int64_t{1} << 40;
  static_assert(kShards.position(kShards.owner(kFar), kShards.local_index(kFar)) == kFar);
}

// Token n of a request is in the local slot that a block table of the same pages gives to the
// rank's token number local_index(n), and on no other rank.
TEST(ContextShards, SlotsFollowTheBlockTable) {
  constexpr int64_t kPages[] = {5, 2, 9};
  for (const ContextShards& shards : all_shards()) {
    const int64_t wide = int64_t{kPageSize} * shards.ranks;
    std::set<std::pair<int32_t, int64_t>> used;
    for (int64_t n = 0; n < 3 * wide; ++n) {
      const int64_t slot = kPages[n / wide] * wide + n % wide;
      for (int32_t rank = 0; rank < shards.ranks; ++rank) {
        const int64_t local = shards.local_slot(slot, kPageSize, rank);
        if (rank != shards.owner(n)) {
          ASSERT_EQ(local, -1);
          continue;
        }
        const int64_t index = shards.local_index(n);
        ASSERT_EQ(local, kPages[index / kPageSize] * kPageSize + index % kPageSize);
        ASSERT_TRUE(used.emplace(rank, local).second);
      }
    }
    EXPECT_EQ(shards.local_slot(-1, kPageSize, 0), -1);
  }
}

TEST(ContextShards, ArraysHoldTheSameValues) {
  constexpr ContextShards kShards{3, 2};
  const std::vector<int32_t> lengths = {0, 1, 5, 6, 257}, q_indptr = {0, 0, 1, 4, 5, 9};
  const std::vector<int64_t> slots = {-1, 50, 51, 52, 200};
  std::vector<int32_t> local(5), visible(9);
  std::vector<int64_t> local_of_slots(5);
  for (int32_t rank = 0; rank < 3; ++rank) {
    local_lengths(kShards, rank, lengths, local);
    local_slots(kShards, kPageSize, rank, slots, local_of_slots);
    visible_lengths(kShards, rank, q_indptr, lengths, visible);
    for (size_t i = 0; i < 5; ++i) {
      EXPECT_EQ(local[i], kShards.local_length(lengths[i], rank));
      EXPECT_EQ(local_of_slots[i], kShards.local_slot(slots[i], kPageSize, rank));
    }
    const std::vector<int64_t> positions = {0, 2, 3, 4, 5, 253, 254, 255, 256};
    for (size_t t = 0; t < 9; ++t) {
      EXPECT_EQ(visible[t], kShards.visible_length(positions[t], rank)) << t;
    }
  }
}

TEST(ContextShards, NamesTheArgument) {
  const std::vector<int32_t> lengths = {4, -2}, indptr = {0, 1, 3};
  std::vector<int32_t> local(2), room(3);
  expect_invalid("ranks is 0", [&] { check_shards({0, 1}, 16); });
  expect_invalid("interleave is 0", [&] { check_shards({2, 0}, 16); });
  expect_invalid("interleave is 3, must divide page_size, 16", [&] { check_shards({2, 3}, 16); });
  expect_invalid("page_size is 0", [&] { check_shards({2, 1}, 0); });
  expect_invalid("lengths[1] is -2", [&] { local_lengths({2, 1}, 0, lengths, local); });
  expect_invalid("rank is 2, must be in [0, 2)", [&] { local_lengths({2, 1}, 2, lengths, local); });
  expect_invalid("room for 1 values, needs 2", [&] {
    local_lengths({2, 1}, 0, lengths, std::span(local).first(1));
  });
  const std::vector<int32_t> short_kv = {1, 1}, falling = {0, 2, 1};
  expect_invalid("kv_lens[1] is 1, must be 0 or at least its 2 new tokens", [&] {
    visible_lengths({2, 1}, 0, indptr, short_kv, room);
  });
  expect_invalid("q_indptr[2] is 1, below q_indptr[1], 2", [&] {
    visible_lengths({2, 1}, 0, falling, std::vector<int32_t>{2, 2}, room);
  });
  expect_invalid("q_indptr holds 3, must hold 2", [&] {
    visible_lengths({2, 1}, 0, indptr, std::vector<int32_t>{2}, room);
  });
}

TEST(ContextParallel, RefusesLayersByName) {
  AttentionSpec spec;
  EXPECT_TRUE(why_not_context_parallel(spec).empty());
  const auto first = [&] { return why_not_context_parallel(spec).at(0); };
  spec.window = 128;
  EXPECT_NE(first().find("window"), std::string::npos);
  spec = {.chunk = 64};
  EXPECT_NE(first().find("chunk"), std::string::npos);
  spec = {.dual_chunk = {64, 16}};
  EXPECT_NE(first().find("dual_chunk"), std::string::npos);
  spec = {.scores = {.has_alibi = true}};
  EXPECT_NE(first().find("has_alibi"), std::string::npos);
  spec = {.mask = MaskKind::tree};
  EXPECT_NE(first().find("mask"), std::string::npos);
  spec = {.scope = AttentionScope::ragged};
  EXPECT_NE(first().find("scope"), std::string::npos);
  spec = {.kind = AttentionKind::mamba2};
  EXPECT_NE(first().find("linear"), std::string::npos);
  spec = {.kind = AttentionKind::mla, .window = 4, .chunk = 4};
  EXPECT_EQ(why_not_context_parallel(spec).size(), 2u);
}

}  // namespace
}  // namespace fovea
