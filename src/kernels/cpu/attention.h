// SPDX-License-Identifier: Apache-2.0
// The fast CPU attention: tiled, split over keys where rows alone do not fill the threads, merged
// in a fixed order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "fovea/batch.h"
#include "fovea/thread_pool.h"
#include "kernels/attention.h"
#include "kernels/cpu/isa.h"

namespace fovea::kernels::cpu {

// What fixes the tiles; nothing in it depends on a batch.
struct AttentionShape {
  Isa isa = Isa::none;
  int32_t threads = 1;
  int32_t q_heads = 0, kv_heads = 0;
  int32_t head_dim = 0, head_dim_v = 0;
  DType q_dtype = DType::f32, kv_dtype = DType::f32;
  // Split keys on a fixed grid of positions, whatever the batch and the threads are.
  bool batch_invariant = false;
};

// The work of one forward pass; points into the workspace it was planned in.
struct AttentionSchedule {
  const void* items = nullptr;
  int64_t item_count = 0;
  void* scratch = nullptr;  // partial results and per-thread tiles
};

// Upper bound over every batch within the limits.
size_t attention_workspace_bytes(const AttentionShape& shape, const BatchLimits& limits);

// Once per pass. Reads lengths, mask and heads of `params`, none of its layer pointers.
AttentionSchedule plan_attention(const AttentionShape& shape, const AttentionParams& params,
                                 std::span<std::byte> workspace);

// Once per layer.
void attention(const AttentionShape& shape, const AttentionParams& params,
               const AttentionSchedule& schedule, ThreadPool& threads);

}  // namespace fovea::kernels::cpu
