// SPDX-License-Identifier: Apache-2.0
// The part of CUDA C++ that kernels use outside of common/ptx.cuh, in C++ for the host.
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
#define __shared__ thread_local  // one per module, as Run::poison requires

#define threadIdx (fovea::emulation::here.thread_index)
#define blockIdx (fovea::emulation::here.block_index)
#define blockDim (fovea::emulation::here.block_size)
#define gridDim (fovea::emulation::here.grid_size)

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(8) int2 {
  int32_t x, y;
};
struct alignas(16) int4 {
  int32_t x, y, z, w;
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
// Values are in the range of the result.
inline uint64_t __double2ull_rn(double x) { return static_cast<uint64_t>(std::nearbyint(x)); }
inline uint64_t __double2ull_rd(double x) { return static_cast<uint64_t>(std::floor(x)); }
inline uint64_t __double2ull_ru(double x) { return static_cast<uint64_t>(std::ceil(x)); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __popc(uint32_t bits) { return std::popcount(bits); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline float __log2f(float x) { return std::log2(x); }
inline int __clz(int bits) { return std::countl_zero(static_cast<uint32_t>(bits)); }
inline int __ffs(int bits) { return bits ? std::countr_zero(static_cast<uint32_t>(bits)) + 1 : 0; }
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
}
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t by) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) << (by & 31) >> 32);
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t by) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (by & 31));
}
// Byte i of the result is the byte of the two words that nibble i of the selector selects.
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return result;
}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
template <typename T>
void __stcs(T* address, T value) {
  *address = value;
}
template <typename T>
T __ldg(const T* address) {
  return *address;
}
// Kernels call it in loops that wait, so other threads run first.
inline int64_t clock64() {
  fovea::emulation::machine.spin("the clock");
  return fovea::emulation::machine.clock();
}

inline void __syncthreads() { fovea::emulation::machine.named_barrier(0, 0, true); }
inline int __syncthreads_or(int value) {
  return fovea::emulation::machine.named_barrier(0, 0, true, value != 0) != 0;
}
inline int __syncthreads_count(int value) {
  return fovea::emulation::machine.named_barrier(0, 0, true, value != 0);
}

// Instructions of a whole warp. Kernels name all lanes in the mask.
namespace fovea::emulation {

inline int lane() { return static_cast<int>(here.thread_index.x % kLanes); }

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
T __shfl_sync(uint32_t mask, T value, int from, int width = fovea::emulation::kLanes) {
  const int first = fovea::emulation::lane() / width * width;
  return fovea::emulation::meet_warp("__shfl_sync", mask, value)[first + from % width];
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
T __shfl_down_sync(uint32_t mask, T value, int by) {
  const auto& all = fovea::emulation::meet_warp("__shfl_down_sync", mask, value);
  return all[std::min(fovea::emulation::lane() + by, fovea::emulation::kLanes - 1)];
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

// Only one thread runs at a time, so plain reads and writes are atomic.
template <typename T>
T atomicAdd(T* to, std::type_identity_t<T> value) {
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
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i)
    c += static_cast<int8_t>(a >> 8 * i) * static_cast<int8_t>(b >> 8 * i);
  return c;
}
inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t c) {
  for (int i = 0; i < 4; ++i) c += (a >> 8 * i & 0xff) * (b >> 8 * i & 0xff);
  return c;
}
inline int __all_sync(uint32_t mask, int value) { return __ballot_sync(mask, value) == mask; }
