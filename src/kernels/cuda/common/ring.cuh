// SPDX-License-Identifier: Apache-2.0
// A ring of stages that a producer fills and consumers give back.
#pragma once

#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

// Position in the ring. Full barriers are waited on with `phase`, empty ones with the other phase.
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
  __device__ __forceinline__ void advance(int steps) {
    stage += steps;
    phase ^= stage / kStages & 1;
    stage %= kStages;
  }
  __device__ __forceinline__ Ring previous() const {
    return stage == 0 ? Ring{kStages - 1, phase ^ 1} : Ring{stage - 1, phase};
  }
  // Returns the position of the n-th item that passes through the ring.
  __device__ __forceinline__ static Ring at(uint32_t n) {
    return {static_cast<int>(n % kStages), n / kStages % 2};
  }
};

}  // namespace fovea::kernels::cuda
