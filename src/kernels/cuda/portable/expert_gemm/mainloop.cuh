// SPDX-License-Identifier: Apache-2.0
// The products of one stage.
#pragma once

#include "kernels/cuda/portable/expert_gemm/config.cuh"

namespace fovea::kernels::cuda {

template <int kRowTile, bool kIsKn>
__device__ inline void multiply_stage(const uint16_t* stage,
                                      float (&sums)[Tiles<kRowTile, kIsKn>::kWarpColumns / 8][4]) {
  constexpr int kWarpColumns = Tiles<kRowTile, kIsKn>::kWarpColumns;
  const uint16_t* const weights = stage + kRowTile * kDepth;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int first_row = kRowTile == 16 ? 0 : warp * 16;
  const int first_column = kRowTile == 16 ? warp * kWarpColumns : 0;
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
    uint32_t a[4];
    load_matrices(a, stage + swizzled(first_row + lane % 16, 2 * step + lane / 16));
#pragma unroll
    for (int pair = 0; pair < kWarpColumns / 16; ++pair) {
      // Four 8x8 matrices: two blocks of 8 columns, each with both halves of the 16 deep step.
      const int matrix = lane / 8;
      const int column = first_column + pair * 16;
      uint32_t b[4];
      if constexpr (kIsKn) {
        const int row = 16 * step + matrix % 2 * 8 + lane % 8;
        load_matrices_transposed(b, weights + swizzled(row, column / 8 + matrix / 2));
      } else {
        const int row = column + matrix / 2 * 8 + lane % 8;
        load_matrices(b, weights + swizzled(row, 2 * step + matrix % 2));
      }
      multiply_add<bf16>(sums[2 * pair], a, b[0], b[1]);
      multiply_add<bf16>(sums[2 * pair + 1], a, b[2], b[3]);
    }
  }
}

}  // namespace fovea::kernels::cuda
