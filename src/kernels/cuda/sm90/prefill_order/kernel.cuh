// SPDX-License-Identifier: Apache-2.0
// Puts the row tiles of a batch in order of their keys, most first, in one CTA and without the host: a
// counting sort. Blocks that take tiles in this order finish within one short tile of each other. The
// order among tiles of one bucket is left to chance; no result depends on it.
#pragma once

#include "kernels/cuda/common/prefill_params.h"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

constexpr int kBuckets = 1024;
// Blocks that read the same keys at about the same time cost L2 least. With few heads in a section the tiles of
// one that run together differ much in length and drift apart, with many its keys leave L2: 16, 32, 64 MB reach
// 682, 704, 714 TFLOP/s at 1x16k and 628, 644, 631 at 4x4k, 32 kv heads (H200, 2026-11-21).
constexpr int64_t kSectionBytes = 32 << 20;

// Calls visit(tile, bucket) for every tile of the batch: a warp for each request, a lane for each tile.
template <typename Visit>
__device__ void for_each_tile(const PrefillOrderParams& params, int shift, Visit visit) {
  const int warps = blockDim.x / 32;
  for (int request = threadIdx.x / 32; request < params.batch.requests; request += warps) {
    const RequestView view = planned_view(params.batch, request);
    const int step = 32 * params.tokens_per_tile;
    for (int first = threadIdx.x % 32 * params.tokens_per_tile; first < view.q_len; first += step) {
      const int last = min(first + params.tokens_per_tile, view.q_len) - 1;
      const Interval keys = visible_keys(params.batch.mask, view, first, last);
      visit(PrefillTile{request, first}, min((keys.end - keys.begin) >> shift, kBuckets - 1));
    }
  }
}

template <int kThreads>
struct PrefillOrderConfig {
  static_assert(kThreads == kBuckets);
  using Params = PrefillOrderParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kThreads, 0, 0, 0};

  __device__ static void run(const Params& params) {
    __shared__ int next[kBuckets];  // first tiles in each bucket, then where the next one goes
    __shared__ int warp_sums[kThreads / 32];
    __shared__ int longest;
    __shared__ unsigned long long all_keys;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    next[threadIdx.x] = 0;
    if (threadIdx.x == 0) longest = all_keys = 0;
    __syncthreads();
    for (int request = threadIdx.x; request < params.batch.requests; request += kThreads) {
      const int keys = planned_view(params.batch, request).kv_len;
      atomicMax(&longest, keys);
      atomicAdd(&all_keys, static_cast<unsigned long long>(keys));
    }
    __syncthreads();
    const int shift = max(0, 32 - __clz(longest) - 10);
    for_each_tile(params, shift, [&](PrefillTile, int bucket) { atomicAdd(&next[bucket], 1); });
    __syncthreads();

    // Tiles in the buckets before, from the fullest down.
    const int bucket = kBuckets - 1 - threadIdx.x;
    const int own = next[bucket];
    int sum = own;
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += before;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; ++w) sum += warp_sums[w];
    next[bucket] = sum - own;
    if (threadIdx.x == kThreads - 1) {
      const int64_t head_bytes = static_cast<int64_t>(all_keys) * params.token_bytes;
      const int64_t heads = head_bytes > 0 ? kSectionBytes / head_bytes : 1;
      // Rounded up to equal sections: a last one of few tiles would leave blocks without work.
      const int kv_heads = params.batch.kv_heads;
      const int sections = kv_heads / static_cast<int>(max(int64_t{1}, min(heads, int64_t{kv_heads})));
      const int section = (kv_heads + sections - 1) / sections;
      const int group = params.batch.q_heads / params.batch.kv_heads;
      *params.order = {params.tiles, sum, section * (group >> params.heads_shift), 0, 0};
    }
    __syncthreads();
    for_each_tile(params, shift, [&](PrefillTile tile, int bucket) {
      params.tiles[atomicAdd(&next[bucket], 1)] = tile;
    });
  }
};

template <int kThreads>
using Config = PrefillOrderConfig<kThreads>;

}  // namespace fovea::kernels::cuda
