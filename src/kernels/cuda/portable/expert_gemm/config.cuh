// SPDX-License-Identifier: Apache-2.0
// Tiles of the grouped product: 16 rows for decode, where an expert has few rows and its weights
// are read once; 64 rows for prefill. Every output element sums over k in ascending steps of 16, so
// the tile changes no bit.
#pragma once

#include "kernels/cuda/common/layer_params.h"
#include "kernels/cuda/common/overlap.cuh"

namespace fovea::kernels::cuda {

constexpr int kColumnTile = 64;
constexpr int kDepth = 64;  // elements of k in one stage: 128 bytes a row
constexpr int kGemmWarps = 4;
constexpr int kChunk = 8;  // bf16 values of one 16-byte copy
constexpr int kChunks = kDepth / kChunk;

template <int kRowTile, bool kIsKn>
struct Tiles {
  // Few rows have few blocks, which need more bytes on their way each: chosen on H200, 2026-11-29.
  static constexpr int kStages = kRowTile == 16 ? 6 : 3;
  static constexpr int kWeightRows = kIsKn ? kDepth : kColumnTile;
  static constexpr int kStageElements = (kRowTile + kWeightRows) * kDepth;
  static constexpr int kSharedBytes = kStages * kStageElements * 2 + kRowTile * 8;
  // Warps share the rows of a large tile and the columns of a small one.
  static constexpr int kWarpColumns = kRowTile == 16 ? kColumnTile / kGemmWarps : kColumnTile;
  static_assert(kColumnTile == kDepth, "rows of [k, n] weights are as long as those of [n, k]");
  static_assert(kRowTile == 16 || kRowTile == 16 * kGemmWarps);
};

// Returns the element offset of a chunk of a row; adjacent rows start in different banks.
__device__ inline int swizzled(int row, int chunk) {
  return row * kDepth + (chunk ^ (row % kChunks)) * kChunk;
}

}  // namespace fovea::kernels::cuda
