// SPDX-License-Identifier: Apache-2.0
// The fast CPU attention: tiled, split over keys where rows alone do not fill the threads, merged
// in a fixed order.
//
// The bits of a row depend on its own query and visible keys alone: not on the batch, the chunking
// of its prompt or the number of threads, nor on whether it is decoded or prefilled.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "fovea/batch.h"
#include "fovea/thread_pool.h"
#include "kernels/attention.h"
#include "kernels/cpu/isa.h"

namespace fovea::kernels::cpu {

struct AttentionItem;
struct AttentionMerge;

// Fixes the sizes of tiles and items. Nothing in it depends on a batch.
struct AttentionShape {
  Isa isa = Isa::none;  // avx2 or avx512
  int32_t threads = 1;  // at least the size of the ThreadPool
  int32_t q_heads = 0, kv_heads = 0;
  int32_t head_dim = 0, head_dim_v = 0;
};

// The work of one forward pass. Points into the workspace it was planned in.
struct AttentionSchedule {
  std::span<const AttentionItem> items;
  std::span<const AttentionMerge> merges;  // for items whose keys are split
  std::byte* scratch = nullptr;            // one part for each thread
  int32_t max_kv_len = 0;                  // fixes the size of a part
  float* partials = nullptr;
};

// Returns an upper bound over every batch within the limits, a multiple of 64. It does not depend
// on dtypes.
size_t attention_workspace_bytes(const AttentionShape& shape, const BatchLimits& limits);

// Plans one pass. Reads the lengths, mask and heads of `params` but none of its layer pointers. The
// workspace must be 64-byte aligned. Throws Error{workspace_too_small} if the batch exceeds the
// limits that the workspace was sized for.
AttentionSchedule plan_attention(const AttentionShape& shape, const AttentionParams& params,
                                 std::span<std::byte> workspace);

// Computes one layer. Takes any mix of dtypes of q, out (f32, f16, bf16), keys and values.
void attention(const AttentionShape& shape, const AttentionParams& params,
               const AttentionSchedule& schedule, ThreadPool& threads);

}  // namespace fovea::kernels::cpu
