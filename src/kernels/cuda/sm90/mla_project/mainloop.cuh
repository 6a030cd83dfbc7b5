// SPDX-License-Identifier: Apache-2.0
// Multiplies one tile, 64 rows a warpgroup.
#pragma once

#include "kernels/cuda/sm90/mla_project/config.cuh"

namespace fovea::kernels::cuda {

// Releases a stage to all blocks of the cluster, which load into it together.
template <class Config>
__device__ __forceinline__ void release(TransactionBarrier& empty) {
  __syncwarp();
  const int lane = threadIdx.x % 32;
  if constexpr (Config::kBlocks > 1) {
    if (lane < Config::kBlocks) arrive_in_cluster(empty, lane);
  } else {
    if (lane == 0) empty.arrive();
  }
}

// Releases the stages of a tile in which the consumer has no live rows.
template <class Config>
__device__ __forceinline__ void skip_tile(const MlaProjectParams& params,
                                          typename Config::SharedMemory& shared,
                                          Ring<Config::kStages>& ring) {
  for (int k = 0; k < params.rank; k += kDepth) {
    shared.full[ring.stage].wait(ring.phase);
    release<Config>(shared.empty[ring.stage]);
    ring.advance();
  }
}

// Computes the sums of the tile's columns, keys before values. One group of products is still
// running when the next one starts.
template <class Config>
__device__ __forceinline__ void multiply(const MlaProjectParams& params,
                                         typename Config::SharedMemory& shared, int consumer,
                                         Ring<Config::kStages>& ring,
                                         float (&sums)[Config::kColumns / 2]) {
  int before = -1;
  for (int k = 0; k < params.rank; k += kDepth) {
    auto& stage = shared.stages[ring.stage];
    shared.full[ring.stage].wait(ring.phase);
    if constexpr (Config::kGathers) fence_async_proxy();
    const uint64_t rows = rows_descriptor(shared_address(stage.latents[consumer * kGroupRows]));
    const uint64_t weights = rows_descriptor(shared_address(stage.weights));
    products_begin();
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
      Product<Config::kColumns>::template run<Config::kType, false>(
          sums, rows + step * 2, weights + step * 2, k > 0 || step > 0);
    }
    products_commit();
    products_wait<1>();
    if (before >= 0) release<Config>(shared.empty[before]);
    before = ring.stage;
    ring.advance();
  }
  products_wait<0>();
  products_landed(sums);
  release<Config>(shared.empty[before]);
}

}  // namespace fovea::kernels::cuda
