// SPDX-License-Identifier: Apache-2.0
// A ring of stages that a producer fills and consumers give back.
#pragma once

#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

// Position in the ring; full barriers are waited on with `phase`, empty ones with the other.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace fovea::kernels::cuda
