// SPDX-License-Identifier: Apache-2.0
// How the workspace of the CPU attention is divided.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/simd/attention/work.h"

namespace fovea::kernels::cpu {

// The maximum of what a batch may need. A larger value in any field needs more workspace.
struct AttentionNeed {
  int64_t requests = 0;
  int64_t tokens = 0;
  int32_t max_kv_len = 0;
};

// Returns an upper bound of the rows that `rows` rows of one head are padded to, for any
// instruction set.
int32_t padded_rows(int32_t rows);

// Return the maximum of padded rows in an item, and in an item whose keys may be split.
int32_t row_capacity(const AttentionShape& shape);
int32_t split_row_capacity(const AttentionShape& shape);

// The number of items per thread that the planner aims at: an item of average cost has total /
// (threads * kItemsPerThread).
inline constexpr int64_t kItemsPerThread = 4;

// Byte offsets into the workspace.
struct AttentionLayout {
  AttentionLayout(const AttentionShape& shape, const AttentionNeed& need);

  int64_t items, merges, partials;  // counts; partials in floats
  size_t items_at, merges_at, partials_at, scratch_at;
  size_t scratch_bytes;  // for one thread
  size_t total;
};

// Divides one thread's scratch, which starts at `memory`. Overwrites the array of states.
AttentionScratch attention_scratch(const AttentionShape& shape, int32_t max_kv_len,
                                   std::byte* memory);

}  // namespace fovea::kernels::cpu
