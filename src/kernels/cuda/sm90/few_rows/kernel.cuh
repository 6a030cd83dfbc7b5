// SPDX-License-Identifier: Apache-2.0
// Attention of requests with up to eight query rows where keys are summed in segments, with the
// bits that sm90/prefill gives them. Keys, or columns of V, are the rows of both products, as in
// sm90/decode: single products of a warp add in the same order as those of a warpgroup.
//
//   warp w, all key tiles of a segment   S^T[16 keys, 8 rows] = K Q^T, then weights
//   all warps wait for each other
//   warp w                               the sum of row w's weights, in the order of sm90/prefill
//   warp w, the same key tiles           O^T[16 columns, 8 rows] += V^T P^T
//   warps 8 and 9                        copy K and V; warp 10 takes row tiles from the list
//
// A ring holds the key tiles of K and then of V, segment by segment. Where blocks outnumber
// segments, blocks of a cluster share one: sharing_block.cuh.
#pragma once

#include "kernels/cuda/sm90/few_rows/consumer.cuh"
#include "kernels/cuda/sm90/few_rows/load.cuh"
#include "kernels/cuda/sm90/few_rows/sharing_block.cuh"

namespace fovea::kernels::cuda {

template <class Config>
__device__ void init_barriers(typename Config::SharedMemory& shared) {
  for (int i = 0; i < Config::kStages; ++i) {
    shared.full[i].init(1);
    shared.empty[i].init(Config::kWarps);
  }
  for (int i = 0; i < kTileSlots; ++i) {
    shared.tile_full[i].init(1);
    shared.tile_empty[i].init(Config::kWarps + Config::kCopiers);
  }
  if constexpr (Config::kSharing > 1) {
    for (TransactionBarrier& full : shared.sharing.keys) full.init(1);
    for (TransactionBarrier& read : shared.sharing.keys_read) read.init(Config::kWarps);
    for (TransactionBarrier& full : shared.sharing.values) full.init(1);
    shared.sharing.scores.init(1);
  }
  if constexpr (Config::kJoined > 1) shared.join.full.init(1);
  fence_barrier_init();
}

template <int kDim, Type kQuery, int kSharingBlocks, int kJoinedSegments>
__device__ void FewRowsConfig<kDim, kQuery, kSharingBlocks, kJoinedSegments>::run(
    const PrefillParams& params) {
  using Config = FewRowsConfig;
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
  if (threadIdx.x == 0) init_barriers<Config>(shared);
  __syncthreads();
  if constexpr (kSharing > 1) cluster_arrive_relaxed();
  // Once a layer has waited for the list and the page table they are complete in the L2.
  if (!params.list_written) wait_for_previous_kernel();
  if constexpr (kSharing > 1) {
    const int head_blocks = params.attention.batch.q_heads >> params.heads_shift;
    const int pieces = params.order->tile_count;
    const bool shares = kJoined > 1
                            ? params.attention.batch.requests == 1 && pieces <= kJoined
                            : pieces * head_blocks <= static_cast<int>(gridDim.x) / kSharing;
    cluster_wait();  // the barriers of all blocks are initialized
    if (shares && SharingBlock<Config>(params, shared).run()) return;
  }
  const int warp = threadIdx.x / 32;
  if (warp < kWarps) {
    Consumer<Config>(params, shared).run();
  } else if (warp < kTaker) {
    KeyCopier<Config>(params, shared, warp - kWarps).run();
  } else {
    take_row_tiles<Config>(params, shared);
  }
}

template <int kDim, Type kQuery, int kSharingBlocks, int kJoinedSegments>
using Config = FewRowsConfig<kDim, kQuery, kSharingBlocks, kJoinedSegments>;

}  // namespace fovea::kernels::cuda
