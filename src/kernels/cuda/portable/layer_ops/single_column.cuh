// SPDX-License-Identifier: Apache-2.0
// Products with matrices of one column, such as the gate of a shared expert, for which cuBLASLt has
// no algorithm at some numbers of rows.
#pragma once

#include "kernels/cuda/portable/layer_ops/config.cuh"

namespace fovea::kernels::cuda {

struct SingleColumnConfig {
  using Params = SingleColumnParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kWarps = 8;
  static constexpr KernelTraits kTraits = {kWarps * 32, 0, kWarps, 0};

  __device__ static void run(const Params& params) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (row >= params.rows) return;
    const int lane = threadIdx.x % 32;
    const auto* const x = static_cast<const uint16_t*>(params.x) + row * params.x_stride;
    const auto* const weight = static_cast<const uint16_t*>(params.weight);
    float sum = 0;
    for (int i = lane; i < params.k; i += 32) {
      sum += from_bf16(x[i]) * from_bf16(weight[i * params.weight_step]);
    }
    sum = warp_sum(sum) + (params.bias ? *params.bias : 0.0f);
    if (lane != 0) return;
    if (params.out_is_f32) {
      static_cast<float*>(params.out)[row * params.out_stride] = sum;
    } else {
      static_cast<uint16_t*>(params.out)[row * params.out_stride] = to_bf16(sum);
    }
  }
};

}  // namespace fovea::kernels::cuda
