// SPDX-License-Identifier: Apache-2.0
// Takes the states of a gated delta net through the chunks of each request, by the terms that
// sm90/gdn_chunks has prepared. A block has 64 of a value head's values, because rows of a state do
// not depend on each other. The chain of states is what takes time, so outputs, which nothing in
// the chain needs, are left to another warpgroup.
//
//   warpgroup 0    states   | S0 -> S1    | S1 -> S2    | ...
//   warpgroup 1    outputs      | O0          | O1          | ...
//   thread 256     producer | chunk | chunk | chunk | waits for a stage | chunk | ...
//
// Barriers: full (producer and copies -> all), empty (8 warps -> producer); state and values, full
// (warps of states -> outputs) and empty (back).
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
                                           kBlockValues, kGdnChunk};
  static_assert(sizeof(SharedMemory) <= kMaxSharedBytes);

  // Padding gives 0.
  __device__ static void clear_out(const Params& params, const Walk& walk) {
    constexpr int kRowChunks = kBlockValues / 8;
    uint16_t* const to =
        params.out + walk.begin * params.out_token_stride + walk.head * kGdnDim + walk.first_value;
    for (int i = static_cast<int>(threadIdx.x); i < walk.tokens * kRowChunks;
         i += kTraits.threads) {
      *reinterpret_cast<uint4*>(to + i / kRowChunks * params.out_token_stride +
                                i % kRowChunks * 8) = {};
    }
  }

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
      fence_barrier_init();
    }
    __syncthreads();
    wait_and_allow_next();
    const Walk walk(params);
    if (walk.tokens < params.min_tokens) return;
    if (walk.slot < 0) return clear_out(params, walk);
    if (walk.chunks == 0) return;
    switch (threadIdx.x / kWarpgroupThreads) {
      case 0:
        take_registers<240>();
        StateWalk<kType>(params, shared, walk).run();
        break;
      case 1:
        give_registers<152>();
        OutputWalk<kType>(params, shared, walk).run();
        break;
      default:
        give_registers<24>();
        if (threadIdx.x == 2 * kWarpgroupThreads) load_chunks(params, shared, walk);
    }
  }
};

template <Type kType>
using Config = GdnStatesConfig<kType>;

}  // namespace fovea::kernels::cuda
