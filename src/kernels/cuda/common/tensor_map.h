// SPDX-License-Identifier: Apache-2.0
// The description of a tensor for the bulk copy engine, read by host and device code alike.
#pragma once

#ifdef __CUDACC_RTC__
#include "kernels/cuda/common/types.cuh"
#else
#include <cstdint>
#endif

namespace fovea::kernels::cuda {

// The driver's CUtensorMap, inside a __grid_constant__ parameter.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

}  // namespace fovea::kernels::cuda
