// SPDX-License-Identifier: Apache-2.0
// Does nothing: measures the cost of a launch.
#pragma once

#include "kernels/cuda/common/measure_params.h"

namespace fovea::kernels::cuda {

template <int kThreads>
struct Config {
  using Params = EmptyParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kThreads, 0, 0, 0};
  __device__ static void run(const Params&) {}
};

}  // namespace fovea::kernels::cuda
