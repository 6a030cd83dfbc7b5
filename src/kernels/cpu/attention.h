// SPDX-License-Identifier: Apache-2.0
// The fast CPU attention: tiled, split over keys where rows alone do not fill the threads, merged
// in a fixed order.
//
// The bits of a row are a function of its own query and visible keys alone: not of the batch, the
// chunking of its prompt, the number of threads, or whether it is decoded or prefilled.
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

// What fixes the tiles; nothing in it depends on a batch.
struct AttentionShape {
  Isa isa = Isa::none;  // avx2 or avx512
  int32_t threads = 1;  // the size of the ThreadPool, or more
  int32_t q_heads = 0, kv_heads = 0;
  int32_t head_dim = 0, head_dim_v = 0;
};

// The work of one forward pass; points into the workspace it was planned in.
struct AttentionSchedule {
  std::span<const AttentionItem> items;
  std::span<const AttentionMerge> merges;  // of the items whose keys were split
  std::byte* scratch = nullptr;            // one part per thread
  int32_t max_kv_len = 0;                  // fixes the size of a part
  float* partials = nullptr;
};

// Upper bound over every batch within the limits, a multiple of 64. It does not depend on dtypes.
size_t attention_workspace_bytes(const AttentionShape& shape, const BatchLimits& limits);

// Once per pass. Reads lengths, mask and heads of `params`, none of its layer pointers. The
// workspace is 64-byte aligned; throws Error{workspace_too_small} when the batch exceeds the limits
// it was sized for.
AttentionSchedule plan_attention(const AttentionShape& shape, const AttentionParams& params,
                                 std::span<std::byte> workspace);

// Once per layer. Any mix of dtypes of q, out (f32, f16, bf16), keys and values.
void attention(const AttentionShape& shape, const AttentionParams& params,
               const AttentionSchedule& schedule, ThreadPool& threads);

}  // namespace fovea::kernels::cpu
