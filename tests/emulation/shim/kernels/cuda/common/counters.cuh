// SPDX-License-Identifier: Apache-2.0
// Replaces src/kernels/cuda/common/counters.cuh. Only one thread runs at a time, so plain reads and
// writes are atomic and ordered.
#pragma once

#include "emulation/cuda.h"

namespace fovea::kernels::cuda {

template <typename T>
T count(T* counter, T next) {
  const T before = std::exchange(*counter, next);
  fovea::emulation::machine.counted();
  return before;
}
inline uint32_t add_acquire_release(uint32_t* counter, uint32_t n) {
  return count(counter, *counter + n);
}
inline int32_t add_acquire_release(int32_t* counter, int32_t n) {
  return count(counter, *counter + n);
}
inline uint32_t increment_acquire_release(uint32_t* counter, uint32_t most) {
  return count(counter, *counter >= most ? 0 : *counter + 1);
}
inline void add_relaxed(uint32_t* counter, uint32_t n) { count(counter, *counter + n); }
// Called in loops that wait for other blocks.
inline uint32_t load_acquire(const uint32_t* counter) {
  fovea::emulation::machine.spin("a counter in global memory");
  return *counter;
}

}  // namespace fovea::kernels::cuda
