// SPDX-License-Identifier: Apache-2.0
// Takes the states of KDA through the chunks of each request, by the terms that sm90/kda_chunks has
// prepared, as sm90/gdn_states does for gated delta net.
//
//   warpgroup 0    states   | S0 -> S1    | S1 -> S2    | ...
//   warpgroup 1    outputs      | O0          | O1          | ...
//   thread 256     keys and values of the next chunks
//   thread 288     queries of the next chunks
//
// Barriers: full and empty of each ring (copies -> warps -> producer); state and values, full
// (warps of states -> outputs) and empty (back).
#pragma once

#include "kernels/cuda/sm90/kda_states/load.cuh"
#include "kernels/cuda/sm90/kda_states/outputs.cuh"
#include "kernels/cuda/sm90/kda_states/states.cuh"

namespace fovea::kernels::cuda {

template <Type kType>
struct KdaStatesConfig {
  using Params = KdaPrefillParams;
  using SharedMemory = WalkMemory;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {3 * kWarpgroupThreads, sizeof(SharedMemory),
                                           kBlockValues, kChunkTokens};
  static_assert(sizeof(SharedMemory) <= kMaxSharedBytes);

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    if (threadIdx.x == 0) init(shared);
    __syncthreads();
    wait_and_allow_next();
    switch (threadIdx.x / kWarpgroupThreads) {
      case 0: {
        take_registers<240>();
        StateWalk<kType> states(params, shared);
        for_each_walk(params, [&](const Walk& walk) { states.run(walk); });
        break;
      }
      case 1: {
        give_registers<152>();
        OutputWalk<kType> outputs(params, shared);
        for_each_walk(params, [&](const Walk& walk) { outputs.run(walk); });
        break;
      }
      default:
        give_registers<24>();
        produce(params, shared);
    }
  }

 private:
  __device__ __forceinline__ static void init(SharedMemory& shared) {
    for (int i = 0; i < kKeyStages; ++i) {
      shared.keys_full[i].init(1);
      shared.keys_empty[i].init(kWarps);
    }
    for (int i = 0; i < kQueryStages; ++i) {
      shared.queries_full[i].init(1);
      shared.queries_empty[i].init(kWarps);
    }
    shared.state.init();
    shared.values.init();
    fence_barrier_init();
  }

  __device__ __forceinline__ static void produce(const Params& params, SharedMemory& shared) {
    if (threadIdx.x == 2 * kWarpgroupThreads) {
      Ring<kKeyStages> ring;
      for_each_walk(params, [&](const Walk& walk) { load_keys(params, shared, walk, ring); });
    } else if (threadIdx.x == 2 * kWarpgroupThreads + 32) {
      Ring<kQueryStages> ring;
      for_each_walk(params, [&](const Walk& walk) { load_queries(params, shared, walk, ring); });
    }
  }
};

template <Type kType>
using Config = KdaStatesConfig<kType>;

}  // namespace fovea::kernels::cuda
