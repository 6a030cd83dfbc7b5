// SPDX-License-Identifier: Apache-2.0
// Which heads, columns and rows of a model each rank of a tensor-parallel group holds.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fovea/api.h"

namespace FOVEA_API fovea {

// [begin, begin + count) of a dimension.
struct ShardRange {
  int64_t begin = 0, count = 0;
};

// Divides `count` things among the ranks in order. Numbers differ by at most 1 if the ranks do not
// divide `count`; with fewer things than ranks, some ranks get none. Throws Error{invalid_argument}
// naming the argument that is out of range.
ShardRange shard_range(int64_t count, int ranks, int rank);

// The attention heads of one rank: q heads [q_begin, q_begin + q_heads), which read kv heads
// [kv_begin, kv_begin + kv_heads). AttentionSpec and pools of a rank count these heads only.
struct HeadShard {
  int32_t q_begin = 0, q_heads = 0;
  int32_t kv_begin = 0, kv_heads = 0;
  int32_t replicas = 1;  // ranks that hold these kv heads; they can share a context instead
};

// Divides the heads among the ranks. With more ranks than kv heads, neighbouring ranks hold the
// same one. MLA has one kv head. Throws Error{invalid_argument} naming the argument and, for heads
// that cannot be divided by `ranks`, the numbers of ranks that can: they divide q_heads, and they
// divide kv_heads or are a multiple of it.
HeadShard shard_heads(int32_t q_heads, int32_t kv_heads, int ranks, int rank);

// Returns these numbers of ranks in ascending order, up to q_heads.
std::vector<int> rank_counts(int32_t q_heads, int32_t kv_heads);

}  // namespace fovea
