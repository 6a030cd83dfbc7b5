// SPDX-License-Identifier: Apache-2.0
// How a warp gives a stage back, or hands it over.
#pragma once

#include "kernels/cuda/common/hopper.cuh"

namespace fovea::kernels::cuda {

// Arrives once for the warp, after all its lanes have read or filled a stage.
__device__ __forceinline__ void release(TransactionBarrier& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier.arrive();
}

}  // namespace fovea::kernels::cuda
