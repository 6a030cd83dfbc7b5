// SPDX-License-Identifier: Apache-2.0
// Prefill whose keys threads of the producer bring: rows that lie in pages of a few tokens, and fp8
// caches, whose values they widen to f16. One persistent block per SM.
//
//   warpgroup 0, the producer
//              rows                        tokens                      boxes
//     warp 1   takes row tiles, finds rows takes row tiles, copies q   takes row tiles, copies raw
//              and masks                   and the page table          K and V, finds masks
//     warps 0, 2, 3, in all columns: gather or widen K and V; warp 0 copies q for rows and boxes
//   warpgroups 1 and 2, consumers of 64 query rows each: sm90/common/consumer.cuh
//   warpgroup 3 of boxes without masks widens V
#pragma once

#include "kernels/cuda/sm90/common/barriers.cuh"
#include "kernels/cuda/sm90/common/consumer.cuh"
#include "kernels/cuda/sm90/prefill_gather/config.cuh"
#include "kernels/cuda/sm90/prefill_gather/load_rows.cuh"
#include "kernels/cuda/sm90/prefill_gather/load_tokens.cuh"
#include "kernels/cuda/sm90/prefill_gather/widen_boxes.cuh"

namespace fovea::kernels::cuda {

template <class Config>
__device__ __forceinline__ void init_barriers(typename Config::SharedMemory& shared) {
  init_operand_barriers<Config>(shared, kLoaderThreads, 32 * kValueWarps<Config>);
  for (int i = 0; i < Config::Raw::kBarriers; ++i) {
    shared.raw_full[i].init(1);
    shared.raw_empty[i].init(i % 2 == 1 ? kValueWarps<Config> : kLoaderWarps);
  }
  for (int i = 0; i < kTileSlots; ++i) {
    shared.tile_full[i].init(Config::kConsumers);
    // Warps that load rows are done with a tile before consumers are.
    shared.tile_empty[i].init(4 * Config::kConsumers);
  }
  init_consumer_barriers<Config>(shared);
  if constexpr (Config::kTokens) {
    for (int i = 0; i < kTokenSlots; ++i) {
      shared.tokens.full[i].init(1);
      shared.tokens.empty[i].init(kLoaderWarps);
    }
  }
  for (int i = 0; i < Config::kPlaceSlots; ++i) {
    shared.places_full[i].init(Config::kWiden ? 64 : 32);  // 64 with copies of scales
    shared.places_empty[i].init(Config::kWidensApart ? kLoaderWarps + kValueWarps<Config>
                                                     : kLoaderWarps);
  }
  fence_barrier_init();
}

// Parts would spill.
template <class Config>
constexpr bool kUniformConsumers = !Config::kParts || Config::kConsumers == 1;

template <class Head, class Elements, Loader kLoad, Scores kScores, Sums kSums>
__device__ __forceinline__ void PrefillGatherConfig<Head, Elements, kLoad, kScores, kSums>::run(
    const PrefillParams& params) {
  using Config = PrefillGatherConfig;
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
  if (threadIdx.x == 0) init_barriers<Config>(shared);
  __syncthreads();
  if (!params.concurrent) wait_for_previous_kernel();
  allow_next_kernel();
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    const int warp = threadIdx.x / 32;
    if constexpr (kBoxes) {
      if (warp == 1) {
        load_raw<Config>(params, shared);
      } else {
        widen_boxes<Config, true, !kWidensApart>(params, shared);
      }
    } else if constexpr (kTokens) {
      if (warp == 1) {
        take_token_tiles<Config>(params, shared);
      } else {
        gather_tokens<Config>(params, shared);
      }
    } else if (warp == 1) {
      locate_rows<Config>(params, shared);
    } else if constexpr (kWiden) {
      widen_rows<Config>(params, shared);
    } else {
      gather_rows<Config>(params, shared);
    }
  } else if (kWidensApart && warpgroup == kWarpgroups - 1) {
    give_registers<kProducerRegisters>();
    if constexpr (kWidensApart) widen_boxes<Config, false, true>(params, shared);
  } else {
    take_registers<kConsumerRegisters>();
    const int consumer = warpgroup - 1;
    Consumer<Config>(params, kUniformConsumers<Config> ? uniform(consumer) : consumer)
        .run(params, shared);
  }
}

template <int kDim, int kDimV, Type kQuery, Type kCache, Loader kLoad, Scores kScores, Sums kSums>
using Config =
    PrefillGatherConfig<HeadDims<kDim, kDimV>, Types<kQuery, kCache>, kLoad, kScores, kSums>;

}  // namespace fovea::kernels::cuda
