// SPDX-License-Identifier: Apache-2.0
// Absorbed MLA decode on Hopper for 64 rows of packed (token, head) pairs a block. A row of the
// latent cache is a key and, without its RoPE columns, a value too. Blocks are persistent. Requests
// with 128 rows are computed by two neighbouring blocks over the same keys; over fp8 caches the two
// form a cluster, and each converts half of the keys for both.
//
//   warpgroup 0   producer: keys in half tiles L (columns 0..255) and R (256..511) and their RoPE
//                 columns; work items and queries. Converts fp8 rows.
//   warpgroup 1   scores     | QK[j] | softmax[j] | QK[j+1]     | softmax[j+1] | QK[j+2]     | ...
//   warpgroup 2   values L                        | P[j]*VL[j]  |              | P[j+1]*VL[j+1] ...
//   warpgroup 3   values R                                      | P[j]*VR[j]   |             | ...
//
// Barriers: tile_full/tile_empty (work items, to all roles), full/empty of a stage (producer ->
// scores; a value warpgroup -> producer), rope_full/rope_empty, q_full/q_empty,
// weights_full/weights_empty (scores -> values and back), scores_done (scores -> values R). At the
// start of an item a stage of the ring brings half of the queries.
#pragma once

#include "kernels/cuda/sm90/mla_common/load_boxes.cuh"
#include "kernels/cuda/sm90/mla_common/queries.cuh"
#include "kernels/cuda/sm90/mla_common/start.cuh"
#include "kernels/cuda/sm90/mla_decode/convert_fp8.cuh"
#include "kernels/cuda/sm90/mla_decode/scores.cuh"
#include "kernels/cuda/sm90/mla_decode/values.cuh"

namespace fovea::kernels::cuda {

template <class C>
__device__ __forceinline__ void init_barriers(typename C::SharedMemory& shared) {
  constexpr int kFullArrivals = C::kKeys == pages ? 1 : C::kFp8 ? C::kKeyWarps : kWarpgroupThreads;
  constexpr int kEmptyArrivals = C::kShares ? 4 * C::kBlocks : 4;
  for (int i = 0; i < C::kStages; ++i) {
    shared.full[i].init(kFullArrivals);
    shared.empty[i].init(kEmptyArrivals);
  }
  for (int i = 0; i < C::kRopeSlots; ++i) {
    shared.rope_full[i].init(kFullArrivals);
    shared.rope_empty[i].init(kEmptyArrivals);
  }
  for (int i = 0; i < kTileSlots; ++i) {
    shared.tile_full[i].init(1);
    shared.tile_empty[i].init(12 + C::kKeyWarps);
  }
  shared.q_full.init(1);
  shared.q_empty.init(4);
  if constexpr (C::kFp8) {
    for (auto& warp : shared.chunk_full) {
      for (TransactionBarrier& chunk : warp) chunk.init(1);
    }
  }
  for (int i = 0; i < C::kWeightSlots; ++i) {
    shared.weights_full[i].init(4);
    shared.weights_empty[i].init(8);
  }
  for (int i = 0; i < 2; ++i) {
    shared.scores_done[i].init(4);
    shared.sums_full[i].init(4);
  }
  if constexpr (C::kPairs) {
    shared.pair.ready.init(4);
    shared.pair.full.init(1);
  }
  fence_barrier_init();
}

// Synchronises both blocks of the cluster.
__device__ __forceinline__ void sync_cluster() {
  __syncwarp();
  cluster_arrive();
  cluster_wait();
}

template <class C>
__device__ __forceinline__ void run_producer(const MlaDecodeParams& params,
                                             typename C::SharedMemory& shared,
                                             const FirstWork& first) {
  if constexpr (C::kKeys == pages) {
    produce_boxes<C>(params, shared, first);
  } else if constexpr (C::kFp8) {
    produce_rows<C, RowConverter<C>>(params, shared, first);
  } else {
    produce_rows<C, RowCopier<C>>(params, shared, first);
  }
}

template <int kRank, int kRope, Type kQuery, Keys kCache, RowBlocks kRowBlocks>
__device__ void MlaDecodeConfig<kRank, kRope, kQuery, kCache, kRowBlocks>::run(
    const MlaDecodeParams& params) {
  using C = MlaDecodeConfig;
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
  constexpr int kListThreads = list_threads(kKeys);
  constexpr int kEarlyThreads = early_threads(kKeys);
  if (threadIdx.x == kMapsThread) prefetch_maps<C>(params);
  FirstWork first;
  if (threadIdx.x < kListThreads && params.list_complete) first.read(block_range<C>(params));
  if (threadIdx.x == kWarpgroupThreads) init_barriers<C>(shared);
  if constexpr (kShares || kPairs) {
    sync_cluster();
  } else {
    __syncthreads();
  }
  if (kFp8 || !params.list_complete || threadIdx.x >= kEarlyThreads) {
    wait_for_previous_kernel();
    allow_next_kernel();
  }
  if (threadIdx.x < kListThreads && !params.list_complete) first.read(block_range<C>(params));
  int warpgroup = threadIdx.x / kWarpgroupThreads;
  // Made uniform where that makes the code a sixth smaller.
  if constexpr (kPairs) warpgroup = __shfl_sync(~0u, warpgroup, 0);
  if (warpgroup == 0) {
    give_registers<kRegisters.producer>();
    run_producer<C>(params, shared, first);
  } else if (warpgroup == 1) {
    if constexpr (kFp8) {
      give_registers<kRegisters.scores>();  // threads start with 128
    } else {
      take_registers<kRegisters.scores>();
    }
    ScoreWarpgroup<C>(params, shared).run();
  } else {
    take_registers<kRegisters.values>();
    ValueWarpgroup<C>(params, shared, warpgroup - 2).run();
  }
  if constexpr (kShares) sync_cluster();  // the other block may still arrive at barriers here
}

template <int kRank, int kRope, Type kQuery, Keys kCache, RowBlocks kRowBlocks>
using Config = MlaDecodeConfig<kRank, kRope, kQuery, kCache, kRowBlocks>;

}  // namespace fovea::kernels::cuda
