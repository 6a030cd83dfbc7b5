// SPDX-License-Identifier: Apache-2.0
// Replaces src/kernels/cuda/common/ptx.cuh with the same names, in C++.
#pragma once

#include "core/float_types.h"
#include "emulation/cuda.h"
#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

namespace machine_of = fovea::emulation;

inline uint32_t shared_address(const void* pointer) {
  return machine_of::machine.shared_address(pointer);
}

template <typename T>
T opaque(T value) {
  return value;
}
inline int thread_anew() { return static_cast<int>(threadIdx.x); }
template <typename T>
void touch(const T&) {}

inline void copy_async(void* shared, const void* global, int bytes) {
  machine_of::machine.copy({shared, global, 16, static_cast<size_t>(bytes)});
}
inline void copy_word_async(void* shared, const void* global, int bytes) {
  machine_of::machine.copy({shared, global, 4, static_cast<size_t>(bytes)});
}
inline void commit_copies() { machine_of::machine.commit_copies(); }
template <int kPending>
void wait_copies() {
  machine_of::machine.wait_copies(kPending);
}

inline void wait_for_previous_kernel() { machine_of::machine.wait_for_previous_kernel(); }
inline void allow_next_kernel() { machine_of::machine.allow_next_kernel(); }

// Returns elements `column` and `column` + 1 of row `row` of the 8x8 matrix whose rows the lanes
// from `first` on point to.
using RowAddresses = std::array<const void*, machine_of::kLanes>;
inline uint16_t matrix_element(const RowAddresses& rows, int matrix, int row, int column) {
  const void* address = rows[matrix * 8 + row];
  if (reinterpret_cast<uintptr_t>(address) % 16)
    machine_of::machine.fail("a misaligned matrix row");
  return static_cast<const uint16_t*>(address)[column];
}
inline uint32_t matrix_pair(const RowAddresses& rows, int matrix, bool transposed) {
  const int row = machine_of::lane() / 4;
  const int column = machine_of::lane() % 4 * 2;
  const auto at = [&](int r, int c) {
    return transposed ? matrix_element(rows, matrix, c, r) : matrix_element(rows, matrix, r, c);
  };
  return at(row, column) | static_cast<uint32_t>(at(row, column + 1)) << 16;
}
inline void load_matrices(uint32_t (&r)[4], const void* shared) {
  const RowAddresses& rows = machine_of::meet_warp("ldmatrix.x4", ~0u, shared);
  for (int i = 0; i < 4; ++i) r[i] = matrix_pair(rows, i, false);
}
inline void load_two_matrices(uint32_t& r0, uint32_t& r1, const void* shared) {
  const RowAddresses& rows = machine_of::meet_warp("ldmatrix.x2", ~0u, shared);
  r0 = matrix_pair(rows, 0, false);
  r1 = matrix_pair(rows, 1, false);
}
inline void load_matrices_transposed(uint32_t (&r)[4], const void* shared) {
  const RowAddresses& rows = machine_of::meet_warp("ldmatrix.x4.trans", ~0u, shared);
  for (int i = 0; i < 4; ++i) r[i] = matrix_pair(rows, i, true);
}

template <Type kType>
float to_float(uint16_t bits) {
  return kType == bf16 ? bf16_to_float(bits) : f16_to_float(bits);
}
template <Type kType>
uint16_t from_float(float value) {
  return kType == bf16 ? float_to_bf16(value) : float_to_f16(value);
}
template <Type kType>
float half_of(uint32_t pair, int half) {
  return to_float<kType>(static_cast<uint16_t>(pair >> 16 * half));
}

// Lane l holds, of a, rows l / 4 and l / 4 + 8, columns from l % 4 * 2 and 8 more; of b, column l /
// 4, rows from l % 4 * 2 and 8 more; of d, the rows of a, columns from l % 4 * 2.
template <Type kType>
void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Operands {
    uint32_t a[4], b[2];
  };
  const auto& all = machine_of::meet_warp("mma", ~0u, Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int row = machine_of::lane() / 4;
  const int column = machine_of::lane() % 4 * 2;
  for (int k = 0; k < 16; ++k) {
    const int among = k % 8 / 2;  // which of the four lanes holds this k
    for (int i = 0; i < 4; ++i) {
      const uint32_t left = all[row * 4 + among].a[i / 2 + k / 8 * 2];
      const uint32_t right = all[(column + i % 2) * 4 + among].b[k / 8];
      d[i] += half_of<kType>(left, k % 2) * half_of<kType>(right, k % 2);
    }
  }
}

inline uint32_t to_tf32(float x) { return std::bit_cast<uint32_t>(x) + 0x1000; }

// Lane l holds, of a, rows l / 4 and l / 4 + 8, column l % 4, then l % 4 + 4; of b, the transpose,
// row l / 4 so; of d as above. The bits of operands that tf32 does not have are ignored.
inline void multiply_add_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Operands {
    uint32_t a[4], b[2];
  };
  const auto& all =
      machine_of::meet_warp("mma.tf32", ~0u, Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int row = machine_of::lane() / 4;
  const int column = machine_of::lane() % 4 * 2;
  const auto tf32_of = [](uint32_t bits) { return std::bit_cast<float>(bits & ~0x1fffu); };
  for (int k = 0; k < 8; ++k) {
    for (int i = 0; i < 4; ++i) {
      const uint32_t left = all[row * 4 + k % 4].a[i / 2 + k / 4 * 2];
      const uint32_t right = all[(column + i % 2) * 4 + k % 4].b[k / 4];
      d[i] += tf32_of(left) * tf32_of(right);
    }
  }
}

template <Type kType>
uint32_t pack(float low, float high) {
  return from_float<kType>(low) | static_cast<uint32_t>(from_float<kType>(high)) << 16;
}
template <Type kType>
uint32_t pack_here(float low, float high) {
  return pack<kType>(low, high);
}

template <Type kType>
uint32_t multiply_add_pair(uint32_t a, uint32_t b, uint32_t c) {
  const auto at = [&](int half) {
    return std::fma(half_of<kType>(a, half), half_of<kType>(b, half), half_of<kType>(c, half));
  };
  return pack<kType>(at(0), at(1));
}

inline uint32_t multiply_f16(uint32_t a, uint32_t b) {
  const auto at = [&](int half) { return half_of<f16>(a, half) * half_of<f16>(b, half); };
  return pack<f16>(at(0), at(1));
}

template <uint32_t kSelector>
uint32_t permute_bytes(uint32_t word) {
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t choice = kSelector >> 4 * i & 0xf;
    const uint32_t byte = (choice & 7) < 4 ? word >> 8 * (choice & 3) & 0xff : 0;
    result |= (choice & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << 8 * i;
  }
  return result;
}

inline float exp2_fast(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0 : y;
}
inline float tanh_fast(float x) { return std::tanh(x); }
inline float infinity() { return INFINITY; }

template <typename T>
T load_here(const T& shared) {
  return shared;
}
inline void load_here(uint32_t (&to)[4], uint32_t from) {
  std::memcpy(to, machine_of::machine.shared_pointer(from), sizeof(to));
}
inline void copy_line_async(uint32_t shared, const void* global) {
  copy_async(machine_of::machine.shared_pointer(shared), global, 16);
}
inline void copy_line_or_zero_async(uint32_t shared, const void* global, bool live) {
  copy_async(machine_of::machine.shared_pointer(shared), global, live ? 16 : 0);
}
inline void copy_line_or_zero_async(void* shared, const void* global, bool live) {
  copy_async(shared, global, live ? 16 : 0);
}

inline uint32_t transposed_8x8(uint32_t x) {
  const auto& all = machine_of::meet_warp("movmatrix", ~0u, x);
  const int row = machine_of::lane() / 4;
  const int column = machine_of::lane() % 4 * 2;
  const auto at = [&](int r, int c) { return all[r * 4 + c / 2] >> c % 2 * 16 & 0xffff; };
  return at(column, row) | at(column + 1, row) << 16;
}

template <Type kType>
float2 unpack(uint32_t pair) {
  return {half_of<kType>(pair, 0), half_of<kType>(pair, 1)};
}
inline const char* multiply_add_wide(uint32_t a, uint32_t b, const char* c) {
  return c + static_cast<uint64_t>(a) * b;
}

}  // namespace fovea::kernels::cuda
