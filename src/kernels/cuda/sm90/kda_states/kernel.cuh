// SPDX-License-Identifier: Apache-2.0
// Takes the states of KDA through the chunks of each request, by the terms that sm90/kda_chunks has
// prepared, as sm90/gdn_states does for gated delta net.
//
//   warpgroup 0    states   | S0 -> S1    | S1 -> S2    | ...
//   warpgroup 1    outputs      | O0          | O1          | ...
//   warp 8         keys and values of the next chunks
//   warp 9         queries of the next chunks
//   warps 10, 11   stores            | O0          | O1  | ...
//
// Barriers: full and empty of each ring (copies -> warps -> producer; a stage of queries goes from
// the warps of outputs to those that store, and from these back); state and values, full (warps of
// states -> outputs) and empty (back).
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
    begin_with_previous(params);
    switch (threadIdx.x / kWarpgroupThreads) {
      case 0: {
        take_registers<240>();
        StateWalk<kType> states(params, shared);
        for_each_walk(params, [&](const Walk& walk) { states.run(walk); });
        break;
      }
      case 1: {
        give_registers<152>();
        OutputWalk<kType> outputs(shared);
        for_each_walk(params, [&](const Walk& walk) { outputs.run(walk); });
        break;
      }
      default:
        give_registers<96>();
        load_and_store(params, shared);
    }
    wait_for_previous_kernel();  // so that it is over once this one is
  }

 private:
  __device__ __forceinline__ static void init(SharedMemory& shared) {
    for (int i = 0; i < kKeyStages; ++i) {
      shared.keys_full[i].init(1);
      shared.keys_empty[i].init(kWarps);
    }
    for (int i = 0; i < kQueryStages; ++i) {
      shared.queries_full[i].init(1);
      shared.queries_empty[i].init(kStoringWarps);
      shared.outputs_full[i].init(kWarps);
    }
    shared.state.init();
    shared.values.init();
    fence_barrier_init();
  }

  __device__ __forceinline__ static void load_and_store(const Params& params,
                                                        SharedMemory& shared) {
    const int warp = static_cast<int>(threadIdx.x) / 32 - 2 * kWarps;
    if (warp == 0) {
      Ring<kKeyStages> ring;
      for_each_walk(params, [&](const Walk& walk) { load_keys(params, shared, walk, ring); });
    } else if (warp == 1) {
      Ring<kQueryStages> ring;
      for_each_walk(params, [&](const Walk& walk) { load_queries(params, shared, walk, ring); });
    } else {
      StoreWalk stores(params, shared, warp - 2);
      for_each_walk(params, [&](const Walk& walk) { stores.run(walk); });
    }
  }
};

template <Type kType>
using Config = KdaStatesConfig<kType>;

}  // namespace fovea::kernels::cuda
