// SPDX-License-Identifier: Apache-2.0
// Reads the lengths and slots of a batch once, so that the kernels of all layers find them in one
// load each. A block takes a request.
#pragma once

#include "kernels/cuda/common/linear_params.h"
#include "kernels/cuda/common/overlap.cuh"

namespace fovea::kernels::cuda {

template <int kThreads>
struct LinearPlanConfig {
  using Params = LinearPlanParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kThreads, 0, 0, 0};

  // Returns the slot, or -1 if the pool has no such slot.
  __device__ static int32_t checked(const Params& params, int32_t slot) {
    return slot >= 0 && slot < params.slots ? slot : -1;
  }

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const auto request = static_cast<int32_t>(blockIdx.x);
    const int32_t begin = params.q_indptr[request];
    const int32_t end = min(params.q_indptr[request + 1], params.tokens);
    int has_snapshot = 0;
    for (int32_t token = begin + static_cast<int32_t>(threadIdx.x); token < end;
         token += kThreads) {
      params.plan.token_requests[token] = request;
      if (params.plan.snapshot_slots) {
        const int32_t slot = checked(params, params.snapshot_slots[token]);
        params.plan.snapshot_slots[token] = slot;
        has_snapshot |= slot >= 0;
      }
    }
    has_snapshot = __syncthreads_or(has_snapshot);
    if (threadIdx.x != 0) return;
    const int32_t slot = checked(params, params.state_slots[request]);
    const bool is_long = params.min_chunked > 0 && end - begin >= params.min_chunked;
    params.plan.spans[request] = {begin, end, slot, params.kv_lens[request] <= end - begin,
                                  is_long && slot >= 0 && !has_snapshot};
  }
};

template <int kThreads>
using Config = LinearPlanConfig<kThreads>;

}  // namespace fovea::kernels::cuda
