// SPDX-License-Identifier: Apache-2.0
// Lists the chunks of 64 tokens of all requests, in one block. Chunks begin at a request's first
// token, so that they do not depend on other requests.
#pragma once

#include "kernels/cuda/common/gdn_params.h"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/scan.cuh"

namespace fovea::kernels::cuda {

template <int kThreads>
struct GdnPlanConfig {
  using Params = GdnPlanParams;
  using SharedMemory = ScanMemory<int>;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kThreads, sizeof(SharedMemory), 0, kGdnChunk};

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(16) char dynamic_shared[];
    auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    wait_and_allow_next();
    int end = 0;  // end of the chunks of earlier rounds
    for (int first = 0; first < params.requests; first += kThreads) {
      const int request = first + static_cast<int>(threadIdx.x);
      const bool exists = request < params.requests;
      const int begin = exists ? params.q_indptr[request] : 0;
      const int tokens = exists ? params.q_indptr[request + 1] - begin : 0;
      const bool counts = exists && tokens >= params.min_tokens && params.state_slots[request] >= 0;
      const int own = counts ? (tokens + kGdnChunk - 1) / kGdnChunk : 0;
      int sum;
      const int at = end + exclusive_scan(own, sum, shared);
      if (exists) params.chunk_begin[request] = min(at, params.max_chunks);
      for (int i = 0; i < own && at + i < params.max_chunks; ++i) {
        const int token = i * kGdnChunk;
        params.chunks[at + i] = {begin + token, min(kGdnChunk, tokens - token)};
      }
      end += sum;
    }
    if (threadIdx.x == 0) params.chunk_begin[params.requests] = min(end, params.max_chunks);
  }
};

template <int kThreads>
using Config = GdnPlanConfig<kThreads>;

}  // namespace fovea::kernels::cuda
