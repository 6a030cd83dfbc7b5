// SPDX-License-Identifier: Apache-2.0
// Takes states that only decay and add (Mamba2, lightning attention) through the prompts of
// requests, in chunks of 64 tokens.
//
//   warpgroup 0    states   | S0 -> S1    | S1 -> S2    | ...
//   warpgroup 1    outputs  | Q K^T | O0      | Q K^T | O1      | ...
//   thread 256     copies   | chunk | chunk | chunk | waits for a stage | chunk | ...
//   warp 9         factors of the tokens of each chunk
//
// Barriers: full (copies and the warp of factors -> all), empty (8 warps -> producers); state, full
// (warps of states -> outputs) and empty (back).
#pragma once

#include "kernels/cuda/sm90/ssd_prefill/load.cuh"
#include "kernels/cuda/sm90/ssd_prefill/outputs.cuh"
#include "kernels/cuda/sm90/ssd_prefill/states.cuh"

namespace fovea::kernels::cuda {

template <Type kType>
struct SsdPrefillConfig {
  using Params = SsdPrefillParams;
  using SharedMemory = SsdMemory;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kThreads = 2 * kWarpgroupThreads + 2 * 32;
  static constexpr KernelTraits kTraits = {kThreads, sizeof(SharedMemory), kBlockValues,
                                           kChunkTokens};
  static_assert(sizeof(SharedMemory) <= kMaxSharedBytes);

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        shared.full[i].init(2);
        shared.empty[i].init(2 * kWarps);
      }
      shared.state.init();
      fence_barrier_init();
    }
    __syncthreads();
    wait_and_allow_next();
    const BlockTasks tasks(params);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kWarpgroupThreads) {
      SsdStates<kType> states(params, shared);
      tasks.for_each_walk(params, [&](const Walk& walk) { states.run(walk); });
    } else if (thread < 2 * kWarpgroupThreads) {
      SsdOutputs<kType> outputs(params, shared);
      tasks.for_each_walk(params, [&](const Walk& walk) { outputs.run(walk); });
    } else if (thread == 2 * kWarpgroupThreads) {
      Ring<kStages> ring;
      tasks.for_each_walk(params,
                          [&](const Walk& walk) { load_chunks(params, shared, walk, ring); });
    } else if (thread >= 2 * kWarpgroupThreads + 32) {
      Ring<kStages> ring;
      tasks.for_each_walk(params,
                          [&](const Walk& walk) { find_factors(params, shared, walk, ring); });
    }
  }
};

template <Type kType>
using Config = SsdPrefillConfig<kType>;

}  // namespace fovea::kernels::cuda
