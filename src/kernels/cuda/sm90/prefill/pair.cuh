// SPDX-License-Identifier: Apache-2.0
// Two blocks of a cluster that take neighbouring row tiles as one: each copies half of the columns of K and V to
// both, so that L2 is read once. PTX ISA 8, sm_90.
#pragma once

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/hopper.cuh"

namespace fovea::kernels::cuda {

// One box of a tensor to this place in both blocks, each of which counts its bytes at its `barrier`.
__device__ inline void load_box_to_pair(void* shared, const TensorMap& map, TransactionBarrier& barrier, int c0,
                                        int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(&barrier)), "h"(uint16_t{0b11})
      : "memory");
}

// Until the other block has come as far. All threads.
template <class Config>
__device__ __forceinline__ void meet_pair() {
  if constexpr (Config::kPairs) {
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace fovea::kernels::cuda
