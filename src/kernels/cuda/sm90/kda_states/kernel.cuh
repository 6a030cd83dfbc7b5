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
// The blocks that find the effect of a segment have no outputs: warpgroup 0 has its sums, warpgroup
// 1 its matrix.
//
// Barriers: full and empty of each ring (copies -> warps -> producer; a stage of queries goes from
// the warps of outputs to those that store, and from these back); state and values, full (warps of
// states -> outputs) and empty (back).
#pragma once

#include "kernels/cuda/sm90/kda_states/load.cuh"
#include "kernels/cuda/sm90/kda_states/outputs.cuh"
#include "kernels/cuda/sm90/kda_states/states.cuh"

namespace fovea::kernels::cuda {

// kCut: requests may be in segments.
template <Type kType, bool kCut>
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
    if (kCut) begin_with_previous(params);
    if (threadIdx.x == 0) {
      if (kCut) shared.tasks = BlockTasks::take(params);
      init(shared);
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
  __device__ __forceinline__ static void init(SharedMemory& shared) {
    for (int i = 0; i < kKeyStages; ++i) {
      shared.keys_full[i].init(1);
      shared.keys_empty[i].init(kCut && shared.tasks.finds_effect ? 2 * kWarps : kWarps);
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

  __device__ __forceinline__ static void walk(const Params& params, SharedMemory& shared,
                                              int warpgroup) {
    const BlockTasks tasks = kCut ? shared.tasks : BlockTasks(params);
    if (warpgroup == 0) {
      take_registers<240>();
      StateWalk<kType, kCut> states(params, shared);
      tasks.for_each_walk(params, [&](const Walk& walk) { states.run(walk); });
    } else if (warpgroup == 1) {
      give_registers<152>();
      OutputWalk<kType> outputs(shared);
      tasks.for_each_walk(params, [&](const Walk& walk) { outputs.run(walk); });
    } else {
      give_registers<96>();
      load_and_store(params, shared, tasks);
    }
  }

  __device__ __forceinline__ static void load_and_store(const Params& params, SharedMemory& shared,
                                                        const BlockTasks& tasks) {
    const int warp = static_cast<int>(threadIdx.x) / 32 - 2 * kWarps;
    if (warp == 0) {
      Ring<kKeyStages> ring;
      tasks.for_each_walk(params, [&](const Walk& walk) {
        if (kCut) load_effects(params, walk, shared.effects(ring));
        load_keys(params, shared, walk, ring);
      });
    } else if (warp == 1) {
      Ring<kQueryStages> ring;
      tasks.for_each_walk(params,
                          [&](const Walk& walk) { load_queries(params, shared, walk, ring); });
    } else {
      StoreWalk stores(params, shared, warp - 2);
      tasks.for_each_walk(params, [&](const Walk& walk) { stores.run(walk); });
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
      Ring<kKeyStages> ring;
      load_keys(params, shared, Walk(params, shared.tasks.first), ring);
    }
  }
};

template <Type kType, bool kCut>
using Config = KdaStatesConfig<kType, kCut>;

}  // namespace fovea::kernels::cuda
