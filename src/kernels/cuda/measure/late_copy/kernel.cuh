// SPDX-License-Identifier: Apache-2.0
// Copies long after it has let the next kernel start. A kernel that does not wait sees the old
// contents. For tests of kernels that start before their predecessor ends.
#pragma once

#include "kernels/cuda/common/measure_params.h"
#include "kernels/cuda/common/overlap.cuh"

namespace fovea::kernels::cuda {

template <int kThreads>
struct Config {
  using Params = LateCopyParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kThreads, 0, 0, 0};

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    for (const int64_t begin = clock64(); clock64() - begin < params.cycles;) {
    }
    const auto* from = static_cast<const uint4*>(params.from);
    auto* to = static_cast<uint4*>(params.to);
    const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
         i < params.bytes / 16; i += step) {
      to[i] = from[i];
    }
  }
};

}  // namespace fovea::kernels::cuda
