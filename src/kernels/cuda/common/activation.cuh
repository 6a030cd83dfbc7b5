// SPDX-License-Identifier: Apache-2.0
// bf16 by itself, and the activations of gated MLPs.
#pragma once

#include "kernels/cuda/common/layer_params.h"
#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

__device__ inline float from_bf16(uint16_t bits) { return to_float<bf16>(bits); }
__device__ inline uint16_t to_bf16(float value) {
  return static_cast<uint16_t>(pack<bf16>(value, 0.0f));
}

__device__ inline float sigmoid_of(float x) { return 1.0f / (1.0f + expf(-x)); }

// Returns activation(gate) * up. `activation` is a GatedActivation; alpha and limit are those of
// kClampedSwiglu.
__device__ inline float gated_value(int32_t activation, float alpha, float limit, float gate,
                                    float up) {
  switch (activation) {
    case kSilu:
      return gate * sigmoid_of(gate) * up;
    case kGeluTanh: {
      constexpr float kSqrt2OverPi = 0.79788456f;
      return 0.5f * gate * (1 + tanhf(kSqrt2OverPi * (gate + 0.044715f * gate * gate * gate))) * up;
    }
    default: {
      const float g = fminf(gate, limit);
      const float u = fminf(fmaxf(up, -limit), limit);
      return (u + 1) * (g * sigmoid_of(alpha * g));
    }
  }
}

}  // namespace fovea::kernels::cuda
