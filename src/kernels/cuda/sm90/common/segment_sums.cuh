// SPDX-License-Identifier: Apache-2.0
// How the segments of a row tile's keys are added: from the last to the first, either in shared
// memory by the block that computes all of them, or through global memory by the block that stores
// its segments last. Both do the same operations on the same numbers, so results have the same
// bits.
#pragma once

#include "kernels/cuda/common/counters.cuh"
#include "kernels/cuda/common/log2.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/sm90/common/rows.cuh"

namespace fovea::kernels::cuda {

// Factors of two sums whose rows are relative to different bases.
struct Join {
  float later, earlier;
};
// Factors of a tile's last segment, which has none to be added to.
constexpr Join kNoneLater = {0, 1};

// Adds an earlier segment to the sum of the later ones. A sum of no keys changes no bit of the
// other.
__device__ __forceinline__ Join join_rows(RowSums& later, RowSums earlier) {
  const float base = fmaxf(later.base, earlier.base);
  const Join join = {exp2_fast(later.base - base), exp2_fast(earlier.base - base)};
  later = {base, __fmaf_rn(later.total, join.later, __fmul_rn(earlier.total, join.earlier))};
  return join;
}
__device__ __forceinline__ float join_values(Join join, float later, float earlier) {
  return __fmaf_rn(later, join.later, __fmul_rn(earlier, join.earlier));
}
__device__ __forceinline__ float4 join_values(Join join, float4 later, float4 earlier) {
  return {join_values(join, later.x, earlier.x), join_values(join, later.y, earlier.y),
          join_values(join, later.z, earlier.z), join_values(join, later.w, earlier.w)};
}

// Never returns -0, which a sum over more segments would not keep.
__device__ __forceinline__ float mean(float sum, float factor) {
  return __fmaf_rn(sum, factor, 0.0f);
}

// Returns the factor that turns a row's sums into means, sink included. The thread of the row with
// `writes` stores lse.
__device__ __forceinline__ float finish_row(const PrefillParams& params, const WorkTile& work,
                                            int consumer, int row, RowSums sums, bool writes) {
  const AttentionParams& attention = params.attention;
  const bool empty = sums.total == 0;
  const float factor = empty ? 0.0f : __fdividef(1.0f, sums.total);
  if (!attention.lse && !attention.sinks) return factor;
  const float lse = empty ? -infinity() : (sums.base + log2f(sums.total)) * kLn2;
  const int head = row_head(params, work, row);
  const int token = row_token(params, work, consumer, row);
  if (token >= work.q_len) return factor;
  if (attention.lse && writes) {
    attention.lse[static_cast<int64_t>(work.q_begin + token) * attention.lse_token_stride + head] =
        lse;
  }
  return attention.sinks && !empty ? factor / (1.0f + __expf(attention.sinks[head] - lse)) : factor;
}

__device__ __forceinline__ bool is_cut(const CutSlot& slot) { return slot.cut.count > 0; }

// Returns the first row of the partial result of a cut tile's segment; `segment` counts from the
// tile's first one.
__device__ __forceinline__ int partial_row(const PrefillParams& params, const CutSlot& slot,
                                           int segment) {
  return slot.cut.partial_row + segment * slot.work.q_len * params.attention.batch.q_heads;
}

// Counts the block's segments as stored, and returns whether they were the last missing ones of the
// row tile: all partial results may be read then. One thread calls it after the block's stores.
// `sharers`: blocks that each store some columns of every segment.
__device__ __forceinline__ bool last_stored(const PrefillParams& params, const CutSlot& slot,
                                            int sharers = 1) {
  const int head_blocks = params.attention.batch.q_heads >> params.heads_shift;
  int32_t* stored = params.segments.stored + slot.work.request * head_blocks +
                    (slot.work.q_head >> params.heads_shift);
  const bool last =
      add_acquire_release(stored, slot.cut.own) + slot.cut.own == slot.cut.count * sharers;
  if (last) *stored = 0;
  return last;
}

}  // namespace fovea::kernels::cuda
