// SPDX-License-Identifier: Apache-2.0
// Multiplies one stage.
#pragma once

#include "kernels/cuda/portable/head_gemm/config.cuh"

namespace fovea::kernels::cuda {

// Sums of a warp: [16 rows each][8 columns each][a lane's accumulators of one mma].
template <int kRowTile, bool kIsKn>
using WarpSums =
    float[Tiles<kRowTile, kIsKn>::kWarpRows / 16][Tiles<kRowTile, kIsKn>::kWarpColumns / 8][4];

template <int kRowTile, bool kIsKn>
__device__ inline int warp_row(int thread) {
  using Shape = Tiles<kRowTile, kIsKn>;
  return thread / 32 % Shape::kRowWarps * Shape::kWarpRows;
}
template <int kRowTile, bool kIsKn>
__device__ inline int warp_column(int thread) {
  using Shape = Tiles<kRowTile, kIsKn>;
  return thread / 32 / Shape::kRowWarps * Shape::kWarpColumns;
}

template <int kRowTile, bool kIsKn, Type kType, int kAtOnce>
__device__ inline void multiply_stage(const uint16_t* stage, int thread,
                                      WarpSums<kRowTile, kIsKn>& sums) {
  using Shape = Tiles<kRowTile, kIsKn>;
  const uint16_t* const weights = stage + kRowTile * kDepth;
  const int lane = thread % 32;
  const int first_row = warp_row<kRowTile, kIsKn>(thread);
  const int first_column = warp_column<kRowTile, kIsKn>(thread);
#pragma unroll kAtOnce
  for (int step = 0; step < kDepth / 16; ++step) {
    uint32_t a[Shape::kWarpRows / 16][4];
#pragma unroll
    for (int r = 0; r < Shape::kWarpRows / 16; ++r) {
      const int row = first_row + r * 16 + lane % 16;
      load_matrices(a[r], stage + swizzled<kDepth>(row, 2 * step + lane / 16));
    }
#pragma unroll
    for (int pair = 0; pair < Shape::kWarpColumns / 16; ++pair) {
      // Four 8x8 matrices: two times 8 columns, each with both halves of the step of 16.
      const int matrix = lane / 8;
      const int column = first_column + pair * 16;
      uint32_t b[4];
      if constexpr (kIsKn) {
        const int row = 16 * step + matrix % 2 * 8 + lane % 8;
        load_matrices_transposed(
            b, weights + swizzled<Shape::kWeightWidth>(row, column / 8 + matrix / 2));
      } else {
        const int row = column + matrix / 2 * 8 + lane % 8;
        load_matrices(b, weights + swizzled<Shape::kWeightWidth>(row, 2 * step + matrix % 2));
      }
#pragma unroll
      for (int r = 0; r < Shape::kWarpRows / 16; ++r) {
        multiply_add<kType>(sums[r][2 * pair], a[r], b[0], b[1]);
        multiply_add<kType>(sums[r][2 * pair + 1], a[r], b[2], b[3]);
      }
    }
  }
}

}  // namespace fovea::kernels::cuda
