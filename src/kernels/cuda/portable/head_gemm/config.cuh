// SPDX-License-Identifier: Apache-2.0
// Tiles of the product: 16 to 64 rows for decode, which mostly reads a head's matrix, 128 for
// prefill. With every tile an output element sums over k in steps of 16 in ascending order, so the
// tile does not change results.
#pragma once

#include "kernels/cuda/common/head_gemm_params.h"
#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

constexpr int kDepth = 64;  // values of k in one stage
constexpr int kChunk = 8;   // elements of one 16-byte copy

template <int kRowTile, bool kIsKn>
struct Tiles {
  static_assert(kRowTile == 16 || kRowTile == 32 || kRowTile == 64 || kRowTile == 128);
  static constexpr bool kFewRows = kRowTile < 128;
  // With few rows the weights of all stages are loaded at once: 512 values of k, or 128 if weights
  // are [k, n].
  static constexpr int kStages = !kFewRows ? 3 : kIsKn ? 2 : 8;
  static constexpr int kAhead =
      kFewRows ? kStages : kStages - 1;  // stages loaded before the first products
  static constexpr int kColumnTile = !kFewRows ? 128 : kIsKn ? 64 : 32;
  // The tile of a warp.
  static constexpr int kWarpRows = kRowTile == 16 ? 16 : 32;
  static constexpr int kWarpColumns = kFewRows ? 16 : 64;
  static constexpr int kRowWarps = kRowTile / kWarpRows;
  static constexpr int kWarps = kRowWarps * (kColumnTile / kWarpColumns);

  // The weights of a stage, in their order in memory.
  static constexpr int kWeightRows = kIsKn ? kDepth : kColumnTile;
  static constexpr int kWeightWidth = kIsKn ? kColumnTile : kDepth;
  static constexpr int kStageElements = kRowTile * kDepth + kWeightRows * kWeightWidth;
  static constexpr int kSharedBytes = kStages * kStageElements * 2;
};

// Returns the element offset of a chunk of a row of `kWidth` elements. Neighbouring rows start in
// different banks.
template <int kWidth>
__device__ inline int swizzled(int row, int chunk) {
  return row * kWidth + (chunk ^ (row % 8)) * kChunk;
}

}  // namespace fovea::kernels::cuda
