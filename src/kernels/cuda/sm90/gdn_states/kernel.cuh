// SPDX-License-Identifier: Apache-2.0
// Takes the states of a gated delta net through the chunks of each request, by the terms that
// sm90/gdn_chunks has prepared. The chain of states is what takes time, so outputs, which nothing
// in the chain needs, are left to another warpgroup.
//
//   warpgroup 0    states   | S0 -> S1    | S1 -> S2    | ...
//   warpgroup 1    outputs      | O0          | O1          | ...
//   warp 8         producer | chunk | chunk | chunk | waits for a stage | chunk | ...
//   warps 9, 10    stores            | O0          | O1          | ...
//
// Barriers: full (producer and copies -> all), empty (8 warps -> producer); state and values, full
// (warps of states -> outputs) and empty (back); out, full (warps of outputs -> stores) and empty.
#pragma once

#include "kernels/cuda/sm90/gdn_states/load.cuh"
#include "kernels/cuda/sm90/gdn_states/outputs.cuh"
#include "kernels/cuda/sm90/gdn_states/states.cuh"

namespace fovea::kernels::cuda {

template <Type kType>
struct GdnStatesConfig {
  using Params = GdnPrefillParams;
  using SharedMemory = WalkMemory;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {3 * kWarpgroupThreads, sizeof(SharedMemory),
                                           kBlockValues, kChunkTokens};
  static_assert(sizeof(SharedMemory) <= kMaxSharedBytes);

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        shared.full[i].init(1);
        shared.empty[i].init(2 * kWarps);
      }
      shared.state.init();
      shared.values.init();
      shared.out.init(kStoringWarps);
      fence_barrier_init();
    }
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
      default: {
        give_registers<96>();
        const int warp = static_cast<int>(threadIdx.x) / 32 - 2 * kWarps;
        if (warp == 0) {
          Ring<kStages> ring;
          for_each_walk(params, [&](const Walk& walk) { load_chunks(params, shared, walk, ring); });
        } else if (warp <= kStoringWarps) {
          StoreWalk stores(params, shared, warp - 1);
          for_each_walk(params, [&](const Walk& walk) { stores.run(walk); });
        }
      }
    }
    wait_for_previous_kernel();  // so that it is over once this one is
  }
};

template <Type kType>
using Config = GdnStatesConfig<kType>;

}  // namespace fovea::kernels::cuda
