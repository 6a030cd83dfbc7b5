// SPDX-License-Identifier: Apache-2.0
// Functions for single instructions of sm_80 and later. PTX ISA 8.
#pragma once

#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Returns the value and hides from the compiler where it comes from. The compiler then computes
// what depends on it at each use and keeps nothing in registers over a loop.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ float opaque(float value) {
  asm volatile("" : "+f"(value));
  return value;
}
template <class T>
__device__ __forceinline__ const T* opaque(const T* address) {
  asm volatile("" : "+l"(address));
  return address;
}
// Returns threadIdx.x, read anew, because a kept copy would take a register.
__device__ __forceinline__ int thread_anew() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Reads shared memory at this place in the program. The compiler would otherwise move all reads of
// a loop to its start, which takes too many registers.
__device__ __forceinline__ uint32_t load_here(const uint32_t& shared) {
  uint32_t loaded;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(loaded) : "r"(shared_address(&shared)) : "memory");
  return loaded;
}
__device__ __forceinline__ int2 load_here(const int2& shared) {
  int2 loaded;
  asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];"
               : "=r"(loaded.x), "=r"(loaded.y)
               : "r"(shared_address(&shared))
               : "memory");
  return loaded;
}
__device__ __forceinline__ float2 load_here(const float2& shared) {
  float2 loaded;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(loaded.x), "=f"(loaded.y)
               : "r"(shared_address(&shared))
               : "memory");
  return loaded;
}
__device__ __forceinline__ void load_here(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

// Makes the value available at this point, so that a load starts before its first real use.
__device__ __forceinline__ void touch(const void* value) { asm volatile("" ::"l"(value)); }
__device__ __forceinline__ void touch(int value) { asm volatile("" ::"r"(value)); }
__device__ __forceinline__ void touch(float value) { asm volatile("" ::"f"(value)); }

// Copies 16 bytes to shared memory; only `bytes` (0 or 16) are read and the rest is zero.
__device__ inline void copy_async(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes));
}
// Copies 4 bytes, or zero of them, as copy_async.
__device__ inline void copy_word_async(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes));
}
// As copy_async(), for lines whose other bytes the same warp copies: it makes the L2 fetch 128
// bytes at once (chosen on H200, 2026-11-21: 2.5 % faster for decode of large batches).
__device__ __forceinline__ void copy_line_async(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global));
}
// Writes zeros if not live; `global` is not read then, but must be aligned.
__device__ __forceinline__ void copy_line_or_zero_async(uint32_t shared, const void* global,
                                                        bool live) {
  asm volatile(
      "{\n.reg .pred dead;\nsetp.eq.b32 dead, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, dead;\n}" ::"r"(shared),
      "l"(global), "r"(static_cast<int>(live)));
}
__device__ __forceinline__ void copy_line_or_zero_async(void* shared, const void* global,
                                                        bool live) {
  asm volatile(
      "{\n.reg .pred dead;\nsetp.eq.b32 dead, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, dead;\n}" ::"r"(shared_address(shared)),
      "l"(global), "r"(static_cast<int>(live)));
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending));
}

// A kernel launched with programmatic serialization starts while the preceding one still runs.
// Until this function returns, the kernel must not touch memory that the preceding one reads or
// writes. In other kernels, and before sm_90, it does nothing.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Loads four 8x8 matrices of 16-bit elements; lane l passes the address of row l % 8 of matrix
// l / 8.
__device__ inline void load_matrices(uint32_t (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared)));
}
// Loads two such matrices, with the addresses of lanes 0 to 15.
__device__ inline void load_two_matrices(uint32_t& r0, uint32_t& r1, const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r0), "=r"(r1)
               : "r"(shared_address(shared)));
}
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared)));
}

// Transposes an 8x8 matrix of 16-bit elements; each lane has two of them, as load_matrices() loads
// them.
__device__ __forceinline__ uint32_t transposed_8x8(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// d += a * b for 16x16 times 16x8, f32 accumulators.
template <Type kType>
__device__ inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  if constexpr (kType == bf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Rounds a finite number to tf32, which has the exponents of f32 and 10 bits of fraction. Products
// ignore the bits below, which are not cleared.
__device__ inline uint32_t to_tf32(float x) { return __float_as_uint(x) + 0x1000; }

// d += a * b for 16x8 times 8x8 of tf32. Lane l has rows l / 4 and l / 4 + 8 of columns l % 4, then
// of l % 4 + 4; b the same rows of its transpose.
__device__ inline void multiply_add_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounds two f32 to nearest even; `low` is in the lower half of the result.
template <Type kType>
__device__ inline uint32_t pack(float low, float high) {
  uint32_t bits;
  if constexpr (kType == bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  }
  return bits;
}

// As pack(), at this place in the program. The compiler might move plain conversions to the end,
// where nothing is left to overlap with.
template <Type kType>
__device__ inline uint32_t pack_here(float low, float high) {
  uint32_t bits;
  if constexpr (kType == bf16) {
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  } else {
    asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  }
  return bits;
}

template <Type kType>
__device__ inline float to_float(uint16_t bits) {
  float value;
  if constexpr (kType == bf16) {
    value = __uint_as_float(static_cast<uint32_t>(bits) << 16);
  } else {
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  }
  return value;
}

template <Type kType>
__device__ inline float2 unpack(uint32_t pair) {
  if constexpr (kType == bf16) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
  } else {
    float2 values;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(values.x), "=f"(values.y)
        : "r"(pair));
    return values;
  }
}

// Returns a * b for two f16 each, rounded once.
__device__ __forceinline__ uint32_t multiply_f16(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Returns a * b + c for two values each, rounded once.
template <Type kType>
__device__ __forceinline__ uint32_t multiply_add_pair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  if constexpr (kType == bf16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}

// Returns a * b + c; the compiler would use a 64-bit multiplication.
__device__ __forceinline__ const char* multiply_add_wide(uint32_t a, uint32_t b, const char* c) {
  const char* sum;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(sum) : "r"(a), "r"(b), "l"(c));
  return sum;
}

// Byte i of the result is the byte of `word` that nibble i of the selector names; 4 to 7 name 0. A
// nibble with 8 added gives the byte's sign bit eight times.
template <uint32_t kSelector>
__device__ __forceinline__ uint32_t permute_bytes(uint32_t word) {
  uint32_t result;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(result) : "r"(word), "n"(kSelector));
  return result;
}

// Returns 2^x with an error of 2 ulp; 0 for -inf.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns tanh with a relative error of 5e-7: 1 - 2 / (e^2x + 1), or near 0, where that loses x,
// the series.
__device__ inline float tanh_fast(float x) {
  const float square = x * x;
  const float tail = fmaf(square, fmaf(square, 62.0f / 2835, -17.0f / 315), 2.0f / 15);
  const float series = x * fmaf(square, fmaf(square, tail, -1.0f / 3), 1.0f);
  const float far = 1 - __fdividef(2.0f, exp2_fast(x * 2.8853900817779268f) + 1);
  return fabsf(x) < 0.25f ? series : far;
}

__device__ inline float infinity() { return __int_as_float(0x7f800000); }

}  // namespace fovea::kernels::cuda
