// SPDX-License-Identifier: Apache-2.0
// Replaces src/kernels/cuda/common/wgmma.cuh with the same names.
#pragma once

#include "emulation/products.h"
#include "kernels/cuda/common/operand_descriptor.cuh"
#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

inline void products_begin() {}
inline void products_commit() { machine_of::WarpgroupProducts::own().commit(); }
template <int kPending>
void products_wait() {
  machine_of::WarpgroupProducts::own().wait(kPending);
}
template <int kCount>
void products_landed(float (&)[kCount]) {}

template <Type kType>
float operand_value(const void* at) {
  if constexpr (kType == f8e4m3) return f8e4m3_to_float(*static_cast<const uint8_t*>(at));
  if constexpr (kType != f8e4m3) return to_float<kType>(*static_cast<const uint16_t*>(at));
}

// Returns an element of a as threads hold it: a register holds neighbours, and the registers of
// four lanes follow each other.
template <Type kType>
float register_value(const machine_of::WarpgroupProduct& product, int row, int k) {
  constexpr int kEach = 4 / type_bytes(kType);  // per register
  const int lane = row % 8 * 4 + k / kEach % 4;
  const int index = row % 16 / 8 + k / (4 * kEach) * 2;
  const uint32_t word =
      product.a[static_cast<size_t>(row / 16 * 32 + lane)][static_cast<size_t>(index)];
  const uint32_t bits = word >> k % kEach * (32 / kEach);
  if constexpr (kType == f8e4m3) return f8e4m3_to_float(static_cast<uint8_t>(bits));
  if constexpr (kType != f8e4m3) return to_float<kType>(static_cast<uint16_t>(bits));
}

template <int kColumns>
struct Product {
  template <Type kType, bool kColumnsOperand, bool kColumnsA = false>
  static void run(float* d, uint64_t a, uint64_t b, bool add) {
    machine_of::WarpgroupProducts::own().issue(
        {evaluate<kType, false, kColumnsOperand, kColumnsA>, a, b, add}, d, nullptr);
  }
  template <Type kType, bool kColumnsOperand>
  static void run(float* d, const uint32_t* a, uint64_t b, bool add) {
    machine_of::WarpgroupProducts::own().issue(
        {evaluate<kType, true, kColumnsOperand, false>, 0, b, add}, d, a);
  }

 private:
  static constexpr int kRows = 16;  // per warp

  // Computes the rows of some warps.
  template <Type kType, bool kRegisters, bool kColumnsB, bool kColumnsA>
  static void evaluate(const machine_of::WarpgroupProduct& product, int first_warp, int end_warp) {
    constexpr int kBytes = type_bytes(kType);
    constexpr int kDepth = 32 / kBytes;
    float b[kDepth][kColumns];
    for (int k = 0; k < kDepth; ++k) {
      for (int n = 0; n < kColumns; ++n) {
        b[k][n] = operand_value<kType>(
            machine_of::operand_element<kBytes, kColumnsB>(product.terms.b, n, k));
      }
    }
    for (int row = first_warp * kRows; row < end_warp * kRows; ++row) {
      float a[kDepth];
      for (int k = 0; k < kDepth; ++k) {
        if constexpr (kRegisters) {
          a[k] = register_value<kType>(product, row, k);
        } else {
          a[k] = operand_value<kType>(
              machine_of::operand_element<kBytes, kColumnsA>(product.terms.a, row, k));
        }
      }
      evaluate_row(product, row, a, b);
    }
  }

  // Thread t % 4 of a row holds columns 8 * j + t % 4 * 2 and the next.
  template <int kDepth>
  static void evaluate_row(const machine_of::WarpgroupProduct& product, int row,
                           const float (&a)[kDepth], const float (&b)[kDepth][kColumns]) {
    const auto accumulator = [&](int n) -> float& {
      const int thread = row / 16 * 32 + row % 8 * 4 + n % 8 / 2;
      return product.d[static_cast<size_t>(thread)][n / 8 * 4 + row % 16 / 8 * 2 + n % 2];
    };
    float sums[kColumns] = {};
    if (product.terms.add) {
      for (int n = 0; n < kColumns; ++n) sums[n] = accumulator(n);
    }
    for (int k = 0; k < kDepth; ++k) {
      for (int n = 0; n < kColumns; ++n) sums[n] += a[k] * b[k][n];
    }
    for (int n = 0; n < kColumns; ++n) accumulator(n) = sums[n];
  }
};

}  // namespace fovea::kernels::cuda
