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
// The blocks that find the effect of a segment have no outputs:
//
//   warpgroup 0    sums     | chunk | chunk | ...
//   warpgroup 1    matrix   | chunk | chunk | ...
//   warp 8         producer
//
// Barriers: full (producer and copies -> all), empty (8 warps -> producer); state and values, full
// (warps of states -> outputs) and empty (back); out, full (warps of outputs -> stores) and empty.
#pragma once

#include "kernels/cuda/sm90/gdn_states/load.cuh"
#include "kernels/cuda/sm90/gdn_states/outputs.cuh"
#include "kernels/cuda/sm90/gdn_states/states.cuh"

namespace fovea::kernels::cuda {

// kCut: requests may be in segments.
template <Type kType, bool kCut>
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
    if (kCut) begin_with_previous(params);
    if (threadIdx.x == 0) {
      if (kCut) shared.tasks = BlockTasks::take(params);
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
    if (!kCut) begin_with_previous(params);
    const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroupThreads;
    if (!kCut || !shared.tasks.finds_effect) [[likely]] {
      walk(params, shared, warpgroup);
    } else {
      find_effect(params, shared, warpgroup);
    }
    wait_for_previous_kernel();  // so that it is over once this one is
  }

 private:
  __device__ __forceinline__ static void walk(const Params& params, SharedMemory& shared,
                                              int warpgroup) {
    const BlockTasks tasks = kCut ? shared.tasks : BlockTasks(params);
    if (warpgroup == 0) {
      take_registers<240>();
      StateWalk<kType, kCut> states(params, shared);
      tasks.for_each_walk(params, [&](const Walk& walk) { states.run(walk); });
    } else if (warpgroup == 1) {
      give_registers<152>();
      OutputWalk<kType, kCut> outputs(shared);
      tasks.for_each_walk(params, [&](const Walk& walk) { outputs.run(walk); });
    } else {
      give_registers<96>();
      const int warp = static_cast<int>(threadIdx.x) / 32 - 2 * kWarps;
      if (warp == 0) {
        Ring<kStages> ring;
        tasks.for_each_walk(params, [&](const Walk& walk) {
          if (kCut) load_effects(params, walk, shared.effects(ring));
          load_chunks<true>(params, shared, walk, ring);
        });
      } else if (warp <= kStoringWarps) {
        StoreWalk stores(params, shared, warp - 1);
        tasks.for_each_walk(params, [&](const Walk& walk) { stores.run(walk); });
      }
    }
  }

  __device__ __forceinline__ static void find_effect(const Params& params, SharedMemory& shared,
                                                     int warpgroup) {
    if (warpgroup < 2) {
      take_registers<232>();
      StateWalk<kType, kCut>(params, shared)
          .find_effect(Walk(params, shared.tasks.first), warpgroup == 1);
    } else {
      give_registers<40>();
      if (threadIdx.x / 32 != 2 * kWarps) return;
      Ring<kStages> ring;
      load_chunks<false>(params, shared, Walk(params, shared.tasks.first), ring);
    }
  }
};

template <Type kType, bool kCut>
using Config = GdnStatesConfig<kType, kCut>;

}  // namespace fovea::kernels::cuda
