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

// Four adjacent values, aligned to 8 bytes.
__device__ inline float4 four_from_bf16(const uint16_t* from) {
  const uint2 bits = *reinterpret_cast<const uint2*>(from);
  return {from_bf16(bits.x & 0xffff), from_bf16(bits.x >> 16), from_bf16(bits.y & 0xffff),
          from_bf16(bits.y >> 16)};
}
__device__ inline void four_to_bf16(uint16_t* to, float4 values) {
  *reinterpret_cast<uint2*>(to) = {pack<bf16>(values.x, values.y), pack<bf16>(values.z, values.w)};
}
// Returns true if the address is a multiple of `bytes`.
__device__ inline bool is_aligned(const void* address, int bytes) {
  return reinterpret_cast<uint64_t>(address) % bytes == 0;
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
