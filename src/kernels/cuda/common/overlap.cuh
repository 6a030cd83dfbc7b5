// SPDX-License-Identifier: Apache-2.0
// For kernels of every architecture that are launched with overlap where the device knows how.
#pragma once

#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

// Waits until all before is complete, then lets the next kernel start. Nothing before sm_90.
__device__ inline void wait_and_allow_next() {
  wait_for_previous_kernel();
  allow_next_kernel();
}

}  // namespace fovea::kernels::cuda
