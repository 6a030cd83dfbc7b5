// SPDX-License-Identifier: Apache-2.0
// Attention of many new tokens over paged or packed keys on Hopper. One persistent block per SM.
//
//   warpgroup 0, the producer: each warp has roles of its own
//              pages, pairs              fp8 products              boxes                 rows
//     warp 0   K                         K and V                   widens K, V; q        copies K,
//     V; q warp 1   row tiles and q           row tiles, q, plain out   row tiles, K, V       row
//     tiles, places of rows warp 2   V                         transposes V              widens K,
//     V           copies K, V warp 3   joins | masks | plain out transposes V              widens
//     K, V           copies K, V
//   tokens: as rows, but warp 1 brings q and entries of the page table
//   warpgroups 1 to 3, consumers of 64 query rows each: consume.cuh
//
// Warp 3 beside pages joins partial results where segments are summed, else finds masks if scores
// are masked, else stores out of pairs at head dim 128. Masks that it does not find are found by
// the warp that brings V or finds rows. The queries of kQueryRing come with K.
#pragma once

#include "kernels/cuda/sm90/prefill/consume.cuh"
#include "kernels/cuda/sm90/prefill/load.cuh"
#include "kernels/cuda/sm90/prefill/load_fp8.cuh"
#include "kernels/cuda/sm90/prefill/load_rows.cuh"
#include "kernels/cuda/sm90/prefill/load_tokens.cuh"
#include "kernels/cuda/sm90/prefill/transpose.cuh"

namespace fovea::kernels::cuda {

template <int kDim, int kDimV, Type kQuery, Type kCache, Loader kLoad, Scores kScores, Sums kSums>
__device__ __forceinline__ void PrefillConfig<kDim, kDimV, kQuery, kCache, kLoad, kScores,
                                              kSums>::run(const PrefillParams& params) {
  using Config = PrefillConfig;
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQueryStages * kConsumers; ++i) {
      shared.q_full[0][i].init(1);
      shared.q_empty[0][i].init(4);
    }
    for (int i = 0; i < kKeyStages; ++i) {
      shared.k_full[i].init(kRows ? kLoaderThreads : 1);
      shared.k_empty[i].init(4 * kConsumers * kBlocks);
    }
    for (int i = 0; i < kStages; ++i) {
      shared.v_full[i].init(kRows ? 32 * kValueWarps : kNarrow ? kTransposers : 1);
      shared.v_empty[i].init(4 * kConsumers * kBlocks);
    }
    for (int i = 0; i < kPieceBarriers; ++i) {
      shared.raw_full[i].init(1);
      shared.raw_empty[i].init(kNarrow ? kTransposers : i % 2 == 1 ? kValueWarps : kLoaderWarps);
    }
    for (int i = 0; i < kTileSlots; ++i) {
      shared.tile_full[i].init(kConsumers);
      if constexpr (kPairs) {
        shared.pair.taken_full[i].init(1);
        shared.pair.taken_empty[i].init(1);
      }
      // Loaders of rows and transposers are done with a tile before consumers are.
      shared.tile_empty[i].init(4 * kConsumers + (kRows                                      ? 0
                                                  : kNarrow                                  ? 1
                                                  : kSegments || kStoresApart || kFindsApart ? 3
                                                                                             : 2));
      if constexpr (kSegments) shared.segments.stored[i].init(4);
    }
    if constexpr (kMasked) {
      for (int i = 0; i < kConsumers; ++i) {
        shared.masks.full[i].init(1);
        shared.masks.empty[i].init(4);
      }
    }
    if constexpr (kStoresApart) {
      for (int i = 0; i < kConsumers; ++i) {
        shared.stores.full[i].init(4);
        shared.stores.empty[i].init(1);
      }
    }
    if constexpr (kTokens) {
      for (int i = 0; i < kTokenSlots; ++i) {
        shared.tokens.full[i].init(1);
        shared.tokens.empty[i].init(kLoaderWarps);
      }
    }
    for (int i = 0; i < kPlaceSlots; ++i) {
      shared.places_full[i].init(kWiden ? 64 : 32);  // with copies of scales
      shared.places_empty[i].init(kWidensApart ? kLoaderWarps + kValueWarps : kLoaderWarps);
    }
    fence_barrier_init();
  }
  if constexpr (!kRows) {
    if (threadIdx.x == 32) prefetch_maps<Config>(params);
  }
  __syncthreads();
  meet_pair<Config>();  // the barriers of both are there
  // What is settled is read ahead of the wait, by warps that wait afterwards.
  const bool beside = !kSegments && params.beside;
  if (!beside && !(kReadsAhead && params.list_settled)) wait_for_previous_kernel();
  allow_next_kernel();
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    const int warp = threadIdx.x / 32;
    if constexpr (!kRows) {
      if (warp == 0) copy_tiles<Config, true, kNarrow>(params, shared);
      if constexpr (kNarrow) {
        if (warp >= 2) transpose_values<Config>(params, shared);
      } else {
        if (warp == 2) copy_tiles<Config, false, true>(params, shared);
      }
      if constexpr (kTakerStores) {
        if (warp == 1) take_and_store_tiles<Config>(params, shared);
      } else {
        if (warp == 1) take_tiles<Config>(params, shared);
      }
      if constexpr (kSegments) {
        if (warp == 3) join_tiles<Config>(params, shared);
      }
      if constexpr (kFindsApart) {
        // Anew: roles that have no register to spare lie between.
        if (thread_anew() / 32 == 3) find_all_masks<Config>(params, shared);
      }
      if constexpr (kStoresApart && !kTakerStores) {
        if (warp == 3) store_tiles<Config>(params, shared);
      }
    } else if constexpr (kBoxes) {
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
    consume<Config>(params, shared, kUniform ? uniform(warpgroup - 1) : warpgroup - 1);
  }
  meet_pair<Config>();  // neither needs the other's shared memory
}

template <int kDim, int kDimV, Type kQuery, Type kCache, Loader kLoad, Scores kScores, Sums kSums>
using Config = PrefillConfig<kDim, kDimV, kQuery, kCache, kLoad, kScores, kSums>;

}  // namespace fovea::kernels::cuda
