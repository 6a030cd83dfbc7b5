// SPDX-License-Identifier: Apache-2.0
// Reads memory with plain 16-byte loads: the ceiling of the read bandwidth. kUnroll loads are in
// flight before the first is used.
#pragma once

#include "kernels/cuda/common/measure_params.h"

namespace fovea::kernels::cuda {

template <int kThreads, int kUnroll, int kBlocks>
struct Config {
  using Params = ReadParams;
  static constexpr int kBlocksPerSm = kBlocks;
  static constexpr KernelTraits kTraits = {kThreads, 0, 0, 0};

  __device__ static void run(const Params& params) {
    const auto* data = static_cast<const uint4*>(params.data);
    const int64_t count = params.bytes / 16;
    const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
    uint32_t sum = 0;
    int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    for (; at + (kUnroll - 1) * step < count; at += kUnroll * step) {
      uint4 loaded[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) loaded[u] = __ldcs(data + at + u * step);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        sum ^= loaded[u].x ^ loaded[u].y ^ loaded[u].z ^ loaded[u].w;
    }
    for (; at < count; at += step) sum ^= __ldcs(data + at).x;
    if (sum == 0x9e3779b9u) *params.sink = sum;
  }
};

}  // namespace fovea::kernels::cuda
