// SPDX-License-Identifier: Apache-2.0
// Prefill by fp8 products on Hopper. One persistent block per SM.
//
//   warpgroup 0, the producer
//     warp 0   copies K and V; finds masks
//     warp 1   takes row tiles from the list and copies q; stores out unless scores are masked
//     warp 2   transposes V
//     warp 3   transposes V
//   warpgroups 1 to 3, consumers of 64 query rows each: sm90/common/consumer.cuh
#pragma once

#include "kernels/cuda/sm90/common/barriers.cuh"
#include "kernels/cuda/sm90/common/consumer.cuh"
#include "kernels/cuda/sm90/common/copy_tiles.cuh"
#include "kernels/cuda/sm90/prefill_fp8/config.cuh"
#include "kernels/cuda/sm90/prefill_fp8/take_and_store_tiles.cuh"
#include "kernels/cuda/sm90/prefill_fp8/transpose.cuh"

namespace fovea::kernels::cuda {

template <class Config>
__device__ __forceinline__ void init_barriers(typename Config::SharedMemory& shared) {
  init_operand_barriers<Config>(shared, 1, Config::kTransposers);
  for (int i = 0; i < Config::kStages; ++i) {
    shared.raw_full[i].init(1);
    shared.raw_empty[i].init(Config::kTransposers);
  }
  for (int i = 0; i < kTileSlots; ++i) {
    shared.tile_full[i].init(Config::kConsumers);
    // Transposers are done with a tile before consumers are.
    shared.tile_empty[i].init(4 * Config::kConsumers + 1);
  }
  init_consumer_barriers<Config>(shared);
  fence_barrier_init();
}

template <class Head, Type kOperand, Scores kScores>
__device__ __forceinline__ void PrefillFp8Config<Head, kOperand, kScores>::run(
    const PrefillParams& params) {
  using Config = PrefillFp8Config;
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
  if (threadIdx.x == 0) init_barriers<Config>(shared);
  if (threadIdx.x == 32) prefetch_maps<Config>(params);
  __syncthreads();
  // Warps that wait for the previous kernel themselves read what was written before this pass.
  if (!params.concurrent && !params.list_written) wait_for_previous_kernel();
  allow_next_kernel();
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    const int warp = threadIdx.x / 32;
    if (warp == 0) copy_tiles<Config, true, true>(params, shared);
    if (warp >= 2) transpose_values<Config>(params, shared);
    if constexpr (kStoresApart) {
      if (warp == 1) take_and_store_tiles<Config>(params, shared);
    } else {
      if (warp == 1) take_tiles<Config>(params, shared);
    }
  } else {
    take_registers<kConsumerRegisters>();
    Consumer<Config>(params, uniform(warpgroup - 1)).run(params, shared);
  }
}

template <int kDim, int kDimV, Type kOperand, Scores kScores>
using Config = PrefillFp8Config<HeadDims<kDim, kDimV>, kOperand, kScores>;

}  // namespace fovea::kernels::cuda
