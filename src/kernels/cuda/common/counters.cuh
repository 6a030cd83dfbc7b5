// SPDX-License-Identifier: Apache-2.0
// Counters in global memory that all blocks of a GPU share.
#pragma once

#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

// Adds n and returns the previous value. Acquires and releases: this thread's earlier writes are
// visible to threads that add later, and it sees the writes of threads that added earlier.
__device__ __forceinline__ uint32_t add_acquire_release(uint32_t* counter, uint32_t n) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(n)
               : "memory");
  return before;
}
__device__ __forceinline__ int32_t add_acquire_release(int32_t* counter, int32_t n) {
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(n)
               : "memory");
  return before;
}
// As add_acquire_release() with 1, but the counter returns to 0 after `max`.
__device__ __forceinline__ uint32_t increment_acquire_release(uint32_t* counter, uint32_t max) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(max)
               : "memory");
  return before;
}
// Adds n without ordering any other access.
__device__ __forceinline__ void add_relaxed(uint32_t* counter, uint32_t n) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(n) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* counter) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

}  // namespace fovea::kernels::cuda
