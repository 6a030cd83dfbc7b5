// SPDX-License-Identifier: Apache-2.0
// The operations of the family, and sums over a warp or a CTA in a fixed order.
#pragma once

#include "kernels/cuda/common/activation.cuh"
#include "kernels/cuda/common/layer_params.h"
#include "kernels/cuda/common/overlap.cuh"

namespace fovea::kernels::cuda {

enum Op {
  residual,
  prepare_heads,
  gated_activation,
  sigmoid_gate,
  delta_inputs,
  mamba2_inputs,
  kda_gates,
  silu_gate,
  softplus,
  gated_norm,
  divided_norm,
  single_column,
  gather,
  store_rows,
  spread_columns,
  soft_cap,
  record_slots,
  routing,
  group_choices,
  combine,
};

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

}  // namespace fovea::kernels::cuda
