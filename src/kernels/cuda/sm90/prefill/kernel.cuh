// SPDX-License-Identifier: Apache-2.0
// Attention of many new tokens over paged or packed keys on Hopper, whose keys the copy engine
// brings. One persistent block per SM.
//
//   warpgroup 0, the producer
//     warp 0   copies K, and queries that come through its ring
//     warp 1   takes row tiles from the list and copies q
//     warp 2   copies V; finds masks if warp 3 does something else
//     warp 3   joins partial results of segments, or finds masks, or stores out of pairs
//   warpgroups 1 to 3, consumers of 64 query rows each: sm90/common/consumer.cuh
#pragma once

#include "kernels/cuda/sm90/common/barriers.cuh"
#include "kernels/cuda/sm90/common/consumer.cuh"
#include "kernels/cuda/sm90/common/copy_tiles.cuh"
#include "kernels/cuda/sm90/prefill/config.cuh"
#include "kernels/cuda/sm90/prefill/join_tiles.cuh"
#include "kernels/cuda/sm90/prefill/store_tiles.cuh"

namespace fovea::kernels::cuda {

template <class Config>
__device__ __forceinline__ void init_barriers(typename Config::SharedMemory& shared) {
  init_operand_barriers<Config>(shared, 1, 1);
  constexpr bool kThreeWarps = Config::kSegments || Config::kStoresApart || Config::kFindsApart;
  for (int i = 0; i < kTileSlots; ++i) {
    shared.tile_full[i].init(Config::kConsumers);
    if constexpr (Config::kPairs) {
      shared.pair.taken_full[i].init(1);
      shared.pair.taken_empty[i].init(1);
    }
    shared.tile_empty[i].init(4 * Config::kConsumers + (kThreeWarps ? 3 : 2));
    if constexpr (Config::kSegments) shared.segments.stored[i].init(4);
  }
  init_consumer_barriers<Config>(shared);
  fence_barrier_init();
}

template <class Head, Type kOperand, Loader kLoad, Scores kScores, Sums kSums>
__device__ __forceinline__ void PrefillConfig<Head, kOperand, kLoad, kScores, kSums>::run(
    const PrefillParams& params) {
  using Config = PrefillConfig;
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
  if (threadIdx.x == 0) init_barriers<Config>(shared);
  if (threadIdx.x == 32) prefetch_maps<Config>(params);
  __syncthreads();
  meet_pair<Config>();  // the barriers of both blocks are initialized
  // Warps that wait for the previous kernel themselves read what was written before this pass.
  const bool concurrent = !kSegments && params.concurrent;
  if (!concurrent && !(kReadsAhead<Config> && params.list_written)) wait_for_previous_kernel();
  allow_next_kernel();
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    const int warp = threadIdx.x / 32;
    if (warp == 0) copy_tiles<Config, true, false>(params, shared);
    if (warp == 2) copy_tiles<Config, false, true>(params, shared);
    if (warp == 1) take_tiles<Config>(params, shared);
    if constexpr (kSegments) {
      if (warp == 3) join_tiles<Config>(params, shared);
    }
    if constexpr (Base::kFindsApart) {
      // Read again: the roles before have no register to spare.
      if (thread_anew() / 32 == 3) find_all_masks<Config>(params, shared);
    }
    if constexpr (kStoresApart) {
      if (warp == 3) store_tiles<Config>(params, shared);
    }
  } else {
    take_registers<kConsumerRegisters>();
    Consumer<Config>(params, uniform(warpgroup - 1)).run(params, shared);
  }
  meet_pair<Config>();  // neither block needs the other's shared memory any more
}

template <int kDim, int kDimV, Type kOperand, Loader kLoad, Scores kScores, Sums kSums>
using Config = PrefillConfig<HeadDims<kDim, kDimV>, kOperand, kLoad, kScores, kSums>;

}  // namespace fovea::kernels::cuda
