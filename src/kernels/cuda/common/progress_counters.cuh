// SPDX-License-Identifier: Apache-2.0
// Counters in global memory by which a kernel tells the next one, which has started already, what
// it has stored, by the copy engine too. load_acquire() reads them.
#pragma once

#include "kernels/cuda/common/counters.cuh"

namespace fovea::kernels::cuda {

// Adds n. Releases: this thread's earlier writes are visible to threads that acquire the counter
// later.
__device__ __forceinline__ void add_release(uint32_t* counter, uint32_t n) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(n) : "memory");
}
// The counter goes up by 1, or from `max` to 0, without ordering any other access.
__device__ __forceinline__ void increment_relaxed(uint32_t* counter, uint32_t max) {
  asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(counter), "r"(max) : "memory");
}

// Waits until this thread's stores by the copy engine are complete and visible to it.
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// Lets the copy engine read from global memory what this thread has written or acquired.
__device__ __forceinline__ void fence_global_async_proxy() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace fovea::kernels::cuda
