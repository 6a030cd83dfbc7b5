// SPDX-License-Identifier: Apache-2.0
// The operations of the family, and sums over a warp or a CTA in a fixed order.
#pragma once

#include "kernels/cuda/common/layer_params.h"
#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

enum Op {
  residual,
  prepare_heads,
  gated_activation,
  sigmoid_gate,
  delta_inputs,
  gated_norm,
  single_column,
  gather,
  soft_cap,
  record_slots,
  routing,
  group_choices,
  combine,
};

__device__ inline float from_bf16(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}
__device__ inline uint16_t to_bf16(float value) {
  return static_cast<uint16_t>(pack<bf16>(value, 0.0f));
}

// Returns the sum over a warp in all lanes.
__device__ inline float warp_sum(float value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

// Returns the sum over a block in all threads. `shared` has one value a warp and may be used again
// at once.
template <int kThreads>
__device__ inline float block_sum(float value, float* shared) {
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) sum += shared[warp];
  __syncthreads();
  return sum;
}

__device__ inline float not_a_number() { return __int_as_float(0x7fc00000); }
__device__ inline float sigmoid_of(float x) { return 1.0f / (1.0f + expf(-x)); }

}  // namespace fovea::kernels::cuda
