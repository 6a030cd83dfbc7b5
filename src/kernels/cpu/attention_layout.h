// SPDX-License-Identifier: Apache-2.0
// How the workspace of the CPU attention is divided.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/simd/attention_work.h"

namespace fovea::kernels::cpu {

// What a batch may need at most; every field raises the need.
struct AttentionNeed {
  int64_t requests = 0;
  int64_t tokens = 0;
  int32_t max_kv_len = 0;
};

// Places one head's rows take, whatever the instruction set rounds them to.
int32_t padded_rows(int32_t rows);

// The most places of an item, and of one whose keys may be split.
int32_t row_capacity(const AttentionShape& shape);
int32_t split_row_capacity(const AttentionShape& shape);

// Items are cut so that each thread gets several of about total / (threads * kItemsPerThread).
inline constexpr int64_t kItemsPerThread = 4;

// Byte offsets into the workspace.
struct AttentionLayout {
  AttentionLayout(const AttentionShape& shape, const AttentionNeed& need);

  int64_t items, merges, partials;  // how many; partials in floats
  size_t items_at, merges_at, partials_at, scratch_at;
  size_t scratch_bytes;  // of one thread
  size_t total;
};

// The parts of one thread's scratch that starts at `memory`; the states are rewritten.
AttentionScratch attention_scratch(const AttentionShape& shape, int32_t max_kv_len,
                                   std::byte* memory);

}  // namespace fovea::kernels::cpu
