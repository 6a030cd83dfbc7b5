// SPDX-License-Identifier: Apache-2.0
// Two blocks of a cluster that take neighbouring row tiles as one: each copies half of the columns
// of K and V to both, so that they are read from the L2 once. PTX ISA 8, sm_90.
#pragma once

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/hopper.cuh"

namespace fovea::kernels::cuda {

// Waits until the other block has come as far. All threads call it.
template <class Config>
__device__ __forceinline__ void meet_pair() {
  if constexpr (Config::kPairs) {
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace fovea::kernels::cuda
