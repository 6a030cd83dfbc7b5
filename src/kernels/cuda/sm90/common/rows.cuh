// SPDX-License-Identifier: Apache-2.0
// Which token, q head and keys belong to a row of a row tile.
#pragma once

#include "kernels/cuda/sm90/common/work_tile.cuh"

namespace fovea::kernels::cuda {

// Returns the value of the warp's first thread, or whether any thread of the warp has true. The
// compiler learns that the result is the same in all of its threads: it serialises warpgroup
// products whose control flow may diverge within a warp.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }
__device__ __forceinline__ bool uniform(bool value) { return __any_sync(~0u, value); }

// The base of a row that has seen nothing: finite, so that hidden keys weigh 0 and the first seen
// one outgrows it.
constexpr float kNothing = -0x1p127f;

// Key tiles of a segment.
template <class Config>
constexpr int kSegmentBlocks = kSegmentKeys / Config::kKeys;

// Returns one of the thread's two rows of the warpgroup's 64: lane / 4 or lane / 4 + 8 of its
// warp's 16.
__device__ __forceinline__ int thread_row(int half, uint32_t thread = threadIdx.x) {
  return thread % kWarpgroupThreads / 32 * 16 + thread % 32 / 4 + half * 8;
}

// Returns the token, counted within its request, of a consumer's row. It may lie past the end of
// the request.
__device__ __forceinline__ int row_token(const PrefillParams& params, const WorkTile& work,
                                         int consumer, int row) {
  return work.first_token + ((consumer * kGroupRows + row) >> params.heads_shift);
}
__device__ __forceinline__ int row_head(const PrefillParams& params, const WorkTile& work,
                                        int row) {
  return work.q_head + (row & ((1 << params.heads_shift) - 1));
}

// Returns the keys that a row sees, for masks that need no predicate. Rows past the request's end
// repeat its last one. There is no branch here: after one the compiler would not know that all
// threads of a warp go through the same key tiles.
__device__ __forceinline__ Interval row_keys(const PrefillParams& params, const WorkTile& work,
                                             const RequestView& view, int consumer, int row) {
  const MaskParams& all = params.attention.batch.mask;
  MaskParams mask = {};
  mask.causal = all.causal;
  mask.first_keys = all.first_keys;
  mask.window = all.window;
  mask.chunk = all.chunk > 0 ? all.chunk : 0x7fffffff;
  const int token = min(row_token(params, work, consumer, row), work.q_len - 1);
  return visible_keys(mask, view, token, token);
}

}  // namespace fovea::kernels::cuda
