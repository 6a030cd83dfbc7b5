// SPDX-License-Identifier: Apache-2.0
// Tiles of the product. 16 to 64 rows for decode, where reading a head's matrix is most of the
// work; 128 for prefill. Either way an output element sums over k in steps of 16 from the first to
// the last, so the tile moves no bit.
#pragma once

#include "kernels/cuda/common/head_gemm_params.h"
#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

constexpr int kDepth = 64;  // of k in one stage
constexpr int kChunk = 8;   // elements of one 16-byte copy

template <int kRowTile, bool kIsKn>
struct Tiles {
  static_assert(kRowTile == 16 || kRowTile == 32 || kRowTile == 64 || kRowTile == 128);
  static constexpr bool kFewRows = kRowTile < 128;
  // Few rows are a matter of reading weights: all that a CTA needs are on their way at once, of 512
  // values of k, or 128 where they are [k, n].
  static constexpr int kStages = !kFewRows ? 3 : kIsKn ? 2 : 8;
  static constexpr int kAhead =
      kFewRows ? kStages : kStages - 1;  // stages asked for before the first products
  static constexpr int kColumnTile = !kFewRows ? 128 : kIsKn ? 64 : 32;
  // What a warp computes.
  static constexpr int kWarpRows = kRowTile == 16 ? 16 : 32;
  static constexpr int kWarpColumns = kFewRows ? 16 : 64;
  static constexpr int kRowWarps = kRowTile / kWarpRows;
  static constexpr int kWarps = kRowWarps * (kColumnTile / kWarpColumns);

  // The weights of a stage as they lie in memory.
  static constexpr int kWeightRows = kIsKn ? kDepth : kColumnTile;
  static constexpr int kWeightWidth = kIsKn ? kColumnTile : kDepth;
  static constexpr int kStageElements = kRowTile * kDepth + kWeightRows * kWeightWidth;
  static constexpr int kSharedBytes = kStages * kStageElements * 2;
};

// Element offset of chunk `chunk` of a row of `kWidth` elements; neighbouring rows start in
// different banks.
template <int kWidth>
__device__ inline int swizzled(int row, int chunk) {
  return row * kWidth + (chunk ^ (row % 8)) * kChunk;
}

}  // namespace fovea::kernels::cuda
