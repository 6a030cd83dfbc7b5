// SPDX-License-Identifier: Apache-2.0
// The start of kernels that overlap with the preceding kernel on devices that support this.
#pragma once

#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

// Waits until the preceding kernel is complete, then lets the next kernel start. Does nothing
// before sm_90.
__device__ inline void wait_and_allow_next() {
  wait_for_previous_kernel();
  allow_next_kernel();
}

}  // namespace fovea::kernels::cuda
