// SPDX-License-Identifier: Apache-2.0
#include "fovea/tensor_parallel.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "core/check.h"

namespace fovea {
namespace {

void check_rank(int ranks, int rank) {
  check_argument(ranks > 0, "ranks is {}, must be positive", ranks);
  check_argument(rank >= 0 && rank < ranks, "rank is {}, must be in [0, {})", rank, ranks);
}

void check_heads(int32_t q_heads, int32_t kv_heads) {
  check_argument(kv_heads > 0, "kv_heads is {}, must be positive", kv_heads);
  check_argument(q_heads > 0 && q_heads % kv_heads == 0,
                 "q_heads is {}, must be a positive multiple of kv_heads, {}", q_heads, kv_heads);
}

bool can_divide(int32_t q_heads, int32_t kv_heads, int ranks) {
  return q_heads % ranks == 0 && (kv_heads % ranks == 0 || ranks % kv_heads == 0);
}

}  // namespace

ShardRange shard_range(int64_t count, int ranks, int rank) {
  check_argument(count >= 0, "count is {}, must not be negative", count);
  check_rank(ranks, rank);
  // The first `rest` ranks get one more. Products of count and rank could overflow.
  const int64_t each = count / ranks, rest = count % ranks;
  return {rank * each + std::min<int64_t>(rank, rest), each + (rank < rest ? 1 : 0)};
}

std::vector<int> rank_counts(int32_t q_heads, int32_t kv_heads) {
  check_heads(q_heads, kv_heads);
  std::vector<int> counts;
  for (int ranks = 1; ranks <= q_heads; ++ranks) {
    if (can_divide(q_heads, kv_heads, ranks)) counts.push_back(ranks);
  }
  return counts;
}

HeadShard shard_heads(int32_t q_heads, int32_t kv_heads, int ranks, int rank) {
  check_heads(q_heads, kv_heads);
  check_rank(ranks, rank);
  check_argument(can_divide(q_heads, kv_heads, ranks),
                 "ranks is {}, {} q heads and {} kv heads can be divided among {}", ranks, q_heads,
                 kv_heads, fmt::join(rank_counts(q_heads, kv_heads), ", "));
  HeadShard shard;
  shard.q_heads = q_heads / ranks;
  shard.q_begin = rank * shard.q_heads;
  shard.kv_heads = std::max(1, kv_heads / ranks);
  shard.replicas = std::max(1, ranks / kv_heads);
  shard.kv_begin = rank / shard.replicas * shard.kv_heads;
  return shard;
}

}  // namespace fovea
