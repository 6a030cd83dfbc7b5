// SPDX-License-Identifier: Apache-2.0
// Accesses to memory that other GPUs and the host access at the same time.
#pragma once

#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

__device__ __forceinline__ uint32_t load_shared_word(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void store_shared_word(uint32_t* to, uint32_t value) {
  asm volatile("st.volatile.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Sixteen bytes, of which each word is read and written at once.
__device__ __forceinline__ void store_shared_quad(uint32_t* to, const uint4& quad) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(quad.x),
               "r"(quad.y), "r"(quad.z), "r"(quad.w)
               : "memory");
}
__device__ __forceinline__ uint4 load_shared_quad(const uint32_t* from) {
  uint4 quad;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(quad.x), "=r"(quad.y), "=r"(quad.z), "=r"(quad.w)
               : "l"(from)
               : "memory");
  return quad;
}

// Nanoseconds of a clock that runs on all GPUs.
__device__ __forceinline__ int64_t global_nanoseconds() {
  int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

}  // namespace fovea::kernels::cuda
