// SPDX-License-Identifier: Apache-2.0
// The products of one tile, 64 rows a warpgroup.
#pragma once

#include "kernels/cuda/sm90/mla_project/config.cuh"

namespace fovea::kernels::cuda {

// A stage is free when the consumers of both blocks have read it.
__device__ __forceinline__ void release(TransactionBarrier& empty) {
  __syncwarp();
  const int lane = threadIdx.x % 32;
  if (lane < kBlocks) arrive_in_cluster(empty, lane);
}

// sums: keys, values. One group of products stays unfinished while the next begins.
template <Type kType, bool kGathers>
__device__ __forceinline__ void multiply(const MlaProjectParams& params, SharedMemory& shared, int consumer,
                                         Ring<kStages>& ring, float (&sums)[kColumns / 2]) {
  int before = -1;
  for (int k = 0; k < params.rank; k += kDepth) {
    Stage& stage = shared.stages[ring.stage];
    shared.full[ring.stage].wait(ring.phase);
    if constexpr (kGathers) fence_async_proxy();
    const uint64_t rows = rows_descriptor(shared_address(stage.latents[consumer * kGroupRows]));
    const uint64_t weights = rows_descriptor(shared_address(stage.weights));
    products_begin();
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
      Product<kColumns>::run<kType, false>(sums, rows + step * 2, weights + step * 2, k > 0 || step > 0);
    }
    products_commit();
    products_wait<1>();
    if (before >= 0) release(shared.empty[before]);
    before = ring.stage;
    ring.advance();
  }
  products_wait<0>();
  products_landed(sums);
  release(shared.empty[before]);
}

}  // namespace fovea::kernels::cuda
