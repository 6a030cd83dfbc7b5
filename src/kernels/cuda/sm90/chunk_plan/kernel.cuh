// SPDX-License-Identifier: Apache-2.0
// Lists the requests that are computed in chunks, their chunks of 64 tokens and, if they are cut,
// their segments, in one block. Chunks begin at a request's first token, so that they do not depend
// on other requests.
#pragma once

#include "kernels/cuda/common/chunk_params.h"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/scan.cuh"
#include "kernels/cuda/sm90/chunk_plan/segments.cuh"

namespace fovea::kernels::cuda {

// kCut: long requests may be cut.
template <int kThreads, bool kCut>
struct ChunkPlanConfig {
  using Params = ChunkPlanParams;
  struct SharedMemory {
    ScanMemory<int> scan;
    ChunkWalk whole[kCut ? kMaxCutWalks : 1];  // the first walks
  };
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kThreads, sizeof(SharedMemory), 0, kChunkTokens};

  // Lists the chunks of a request from `at` on. A warp calls this.
  __device__ static void list_chunks(const Params& params, int at, int begin, int tokens) {
    for (int token = static_cast<int>(threadIdx.x) % 32 * kChunkTokens;
         token < tokens && at + token / kChunkTokens < params.max_chunks;
         token += 32 * kChunkTokens) {
      const int chunk = at + token / kChunkTokens;
      params.plan.chunks[chunk] = {begin + token, min(kChunkTokens, tokens - token)};
      if (params.plan.progress) params.plan.progress[chunk] = 0;
    }
  }

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(16) char dynamic_shared[];
    auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    wait_and_allow_next();
    if (kCut) clear_segments(params);
    ChunkCounts end = {};  // sums of earlier rounds
    for (int first = 0; first < params.requests; first += kThreads) {
      const int request = first + static_cast<int>(threadIdx.x);
      StateSpan span = {};
      if (request < params.requests) span = params.spans[request];
      const int tokens = span.in_chunks ? span.end - span.begin : 0;
      const int own = (tokens + kChunkTokens - 1) / kChunkTokens;
      ChunkCounts sums;
      const int at = end.chunks + exclusive_scan(own, sums.chunks, shared.scan);
      const int walk = end.walks + exclusive_scan(own > 0 ? 1 : 0, sums.walks, shared.scan);
      if (own > 0 && walk < params.max_chunked) {
        const int chunks = min(own, max(params.max_chunks - at, 0));
        const ChunkWalk whole = {
            .request = request, .first_chunk = at, .chunks = chunks, .segments = 1};
        params.plan.walks[walk] = whole;
        if (kCut && walk < kMaxCutWalks) shared.whole[walk] = whole;
      }
      for (unsigned lanes = __ballot_sync(~0u, own > 0); lanes != 0; lanes &= lanes - 1) {
        const int lane = __ffs(static_cast<int>(lanes)) - 1;
        list_chunks(params, __shfl_sync(~0u, at, lane), __shfl_sync(~0u, span.begin, lane),
                    __shfl_sync(~0u, tokens, lane));
      }
      end = {end.chunks + sums.chunks, end.walks + sums.walks};
    }
    end.chunks = min(end.chunks, params.max_chunks);
    end.walks = end.early = min(end.walks, params.max_chunked);
    end.chain = end.chunks / max(end.walks, 1);
    if constexpr (kCut) {
      __syncthreads();  // walks are listed
      if (threadIdx.x < 32) SegmentPlanner(params, end).run(shared.whole);
    }
    if (threadIdx.x == 0) *params.plan.counts = end;
  }

 private:
  __device__ static void clear_segments(const Params& params) {
    const int count = params.max_effects * params.value_heads;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) params.plan.found[i] = 0;
    if (threadIdx.x == 0) *params.plan.taken = 0;
  }
};

template <int kThreads, bool kCut>
using Config = ChunkPlanConfig<kThreads, kCut>;

}  // namespace fovea::kernels::cuda
