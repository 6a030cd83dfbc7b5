// SPDX-License-Identifier: Apache-2.0
// The part of CUDA C++ that kernels use outside of common/ptx.cuh, on the machine.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>

#include "emulation/machine.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __constant__ __attribute__((visibility("default")))
#define __shared__ thread_local  // the module's, which Machine::poison relies on

#define threadIdx (fovea::emulation::machine.thread_index)
#define blockIdx (fovea::emulation::machine.block_index)
#define blockDim (fovea::emulation::machine.block_size)
#define gridDim (fovea::emulation::machine.grid_size)

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

template <typename A, typename B>
std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <typename A, typename B>
std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __popc(uint32_t bits) { return std::popcount(bits); }
inline int __clz(int bits) { return std::countl_zero(static_cast<uint32_t>(bits)); }
inline int __ffs(int bits) { return bits ? std::countr_zero(static_cast<uint32_t>(bits)) + 1 : 0; }
template <typename T>
T __ldcg(const T* address) {
  return *address;
}

inline void __syncthreads() { fovea::emulation::machine.meet_block(false); }
inline int __syncthreads_or(int value) { return fovea::emulation::machine.meet_block(value != 0); }

// Instructions of a whole warp: kernels name all lanes.
namespace fovea::emulation {

inline int lane() { return static_cast<int>(machine.thread_index.x % kLanes); }

template <typename T>
const std::array<T, kLanes>& meet_warp(const char* what, uint32_t mask, const T& value) {
  if (mask != ~0u) machine.fail("an instruction of a part of a warp is not emulated");
  return machine.exchange(what, value);
}

}  // namespace fovea::emulation

inline void __syncwarp(uint32_t mask = ~0u) { fovea::emulation::meet_warp("__syncwarp", mask, 0); }
inline uint32_t __ballot_sync(uint32_t mask, int value) {
  uint32_t bits = 0;
  for (const int other : fovea::emulation::meet_warp("__ballot_sync", mask, value)) {
    bits = bits >> 1 | (other != 0 ? 1u << 31 : 0);
  }
  return bits;
}
inline int __any_sync(uint32_t mask, int value) { return __ballot_sync(mask, value) != 0; }
template <typename T>
T __shfl_sync(uint32_t mask, T value, int from) {
  return fovea::emulation::meet_warp("__shfl_sync", mask, value)[from % fovea::emulation::kLanes];
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int bits) {
  return fovea::emulation::meet_warp("__shfl_xor_sync", mask,
                                     value)[fovea::emulation::lane() ^ bits];
}
template <typename T>
T __shfl_up_sync(uint32_t mask, T value, int by) {
  const auto& all = fovea::emulation::meet_warp("__shfl_up_sync", mask, value);
  return all[std::max(fovea::emulation::lane() - by, 0)];
}
template <typename T>
T __reduce_min_sync(uint32_t mask, T value) {
  return std::ranges::min(fovea::emulation::meet_warp("__reduce_min_sync", mask, value));
}
template <typename T>
T __reduce_max_sync(uint32_t mask, T value) {
  return std::ranges::max(fovea::emulation::meet_warp("__reduce_max_sync", mask, value));
}
template <typename T>
T __reduce_add_sync(uint32_t mask, T value) {
  T sum = 0;
  for (const T other : fovea::emulation::meet_warp("__reduce_add_sync", mask, value)) sum += other;
  return sum;
}

// Threads take turns, so that plain reads and writes are atomic.
template <typename T>
T atomicAdd(T* to, T value) {
  return std::exchange(*to, *to + value);
}
template <typename T>
T atomicMax(T* to, T value) {
  return std::exchange(*to, std::max(*to, value));
}
template <typename T>
T atomicOr(T* to, T value) {
  return std::exchange(*to, *to | value);
}
template <typename T>
T atomicMin(T* to, T value) {
  return std::exchange(*to, std::min(*to, value));
}
