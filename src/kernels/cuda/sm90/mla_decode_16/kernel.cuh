// SPDX-License-Identifier: Apache-2.0
// Absorbed MLA decode on Hopper for 16 rows of packed (token, head) pairs a block, over 16-bit
// caches: few heads, or one block's share of many. mma.sync after ldmatrix reads shared memory at
// 128 bytes a cycle; the products of a warpgroup read it at 64.
//
//   warpgroup 0    producer: work items, queries, and keys in stages of two column tiles
//   warpgroups 1-2 eight consumer warps, all on the same key tile:
//                  | scores of 16 keys over half of the columns | exchange | weights of 8 keys |
//                  | values of one eighth of the columns |
//
// Barriers: tile_full/tile_empty (work items, to all roles), full/empty of a stage,
// rope_full/rope_empty, q_full/q_empty; the named barrier all_consumers between the consumers'
// steps.
#pragma once

#include "kernels/cuda/sm90/mla_common/load_boxes.cuh"
#include "kernels/cuda/sm90/mla_common/load_rows.cuh"
#include "kernels/cuda/sm90/mla_common/start.cuh"
#include "kernels/cuda/sm90/mla_decode_16/mainloop.cuh"

namespace fovea::kernels::cuda {

template <class C>
__device__ __forceinline__ void init_barriers(typename C::SharedMemory& shared) {
  constexpr int kFullArrivals = C::kKeys == pages ? 1 : kWarpgroupThreads;
  for (int i = 0; i < C::kStages; ++i) {
    shared.full[i].init(kFullArrivals);
    shared.empty[i].init(kConsumerWarps / C::kTileStages);
  }
  for (int i = 0; i < C::kRopeSlots; ++i) {
    shared.rope_full[i].init(kFullArrivals);
    shared.rope_empty[i].init(kConsumerWarps);
  }
  if constexpr (C::kClusters) shared.cluster.parts_full.init(1);
  for (int i = 0; i < kTileSlots; ++i) {
    shared.tile_full[i].init(1);
    shared.tile_empty[i].init(kConsumerWarps + C::kKeyWarps);
  }
  shared.q_full.init(1);
  shared.q_empty.init(kConsumerWarps);
  fence_barrier_init();
}

// Loads the constants that the end of an item needs while nothing else is to do: the first use of a
// launch's constants reads them from memory.
__device__ __forceinline__ void touch_constants(const MlaDecodeParams& params) {
  touch(params.out.data);
  touch(params.out.lse);
  touch(params.work.partial_out);
  touch(params.work.arrivals);
  touch(params.q_heads);
  touch(params.scale);
  touch(params.batch.mask.tree);
}

template <class C>
__device__ __forceinline__ void run_producer(const MlaDecodeParams& params,
                                             typename C::SharedMemory& shared,
                                             const FirstWork& first) {
  if constexpr (C::kKeys == pages) {
    produce_boxes<C>(params, shared, first);
  } else {
    produce_rows<C, RowCopier<C>>(params, shared, first);
  }
}

template <int kRank, int kRope, Type kQuery, Keys kCache, Joins kJoinedBy>
__device__ void MlaDecode16Config<kRank, kRope, kQuery, kCache, kJoinedBy>::run(
    const MlaDecodeParams& params) {
  using C = MlaDecode16Config;
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
  constexpr int kListThreads = list_threads(kKeys);
  constexpr int kEarlyThreads = early_threads(kKeys);
  if (threadIdx.x == kMapsThread) prefetch_maps<C>(params);
  FirstWork first;
  if (threadIdx.x < kListThreads && params.list_complete) first.read(block_range<C>(params));
  if (threadIdx.x == kWarpgroupThreads) init_barriers<C>(shared);
  __syncthreads();
  if constexpr (kClusters) cluster_arrive_relaxed();  // barriers are ready for the other blocks
  touch_constants(params);
  if (!params.list_complete || threadIdx.x >= kEarlyThreads) {
    wait_for_previous_kernel();
    allow_next_kernel();
  }
  if (threadIdx.x < kListThreads && !params.list_complete) first.read(block_range<C>(params));
  int warpgroup = threadIdx.x / kWarpgroupThreads;
  warpgroup = __shfl_sync(~0u, warpgroup, 0);  // uniform, which makes the code a sixth smaller
  if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    run_producer<C>(params, shared, first);
    if constexpr (kClusters) pass_cluster();
  } else {
    take_registers<kConsumerRegisters>();
    Consumer<C> consumer(params, shared);
    if constexpr (kClusters) {
      consumer.run_once();
    } else {
      consumer.run();
    }
  }
}

template <int kRank, int kRope, Type kQuery, Keys kCache, Joins kJoinedBy>
using Config = MlaDecode16Config<kRank, kRope, kQuery, kCache, kJoinedBy>;

}  // namespace fovea::kernels::cuda
