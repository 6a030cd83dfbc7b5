// SPDX-License-Identifier: Apache-2.0
// Replaces src/kernels/cuda/common/progress_counters.cuh.
#pragma once

#include "kernels/cuda/common/counters.cuh"

namespace fovea::kernels::cuda {

inline void add_release(uint32_t* counter, uint32_t n) { add_acquire_release(counter, n); }
inline void increment_relaxed(uint32_t* counter, uint32_t max) {
  increment_acquire_release(counter, max);
}
inline void wait_stores() { fovea::emulation::machine.wait_stores_read(); }
inline void fence_global_async_proxy() {}

}  // namespace fovea::kernels::cuda
