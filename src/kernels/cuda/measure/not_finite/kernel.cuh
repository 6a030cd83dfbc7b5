// SPDX-License-Identifier: Apache-2.0
// Counts the 16-bit elements that are infinite or NaN. If the outputs held NaN before, it finds
// elements that a kernel did not write.
#pragma once

#include "kernels/cuda/common/measure_params.h"

namespace fovea::kernels::cuda {

constexpr int kNotFiniteThreads = 256;

template <Type kType>
struct Config {
  using Params = NotFiniteParams;
  static constexpr int kBlocksPerSm = 4;
  static constexpr KernelTraits kTraits = {kNotFiniteThreads, 0, 0, 0};

  __device__ static void run(const Params& params) {
    constexpr uint16_t kExponent = kType == bf16 ? 0x7f80 : 0x7c00;
    const auto* data = static_cast<const uint16_t*>(params.data);
    const int64_t step = static_cast<int64_t>(gridDim.x) * kNotFiniteThreads;
    unsigned long long found = 0;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kNotFiniteThreads + threadIdx.x;
         i < params.count; i += step) {
      found += (data[i] & kExponent) == kExponent;
    }
    if (found) atomicAdd(reinterpret_cast<unsigned long long*>(params.found), found);
  }
};

}  // namespace fovea::kernels::cuda
