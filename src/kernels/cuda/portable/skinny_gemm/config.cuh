// SPDX-License-Identifier: Apache-2.0
// Sizes of a product of a few rows.
#pragma once

#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/product_outputs.cuh"

namespace fovea::kernels::cuda {

template <int kTileStages>
struct SkinnySizes {
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kColumnTile = 32;
  static constexpr int kRowTile = 8;
  static constexpr int kColumnBlocks = kColumnTile / 16;  // m16 tiles of a warp
  static constexpr int kDepth = 32;                  // elements of k in a stage, 8 of each lane
  static constexpr int kCopies = kColumnBlocks * 2;  // copies of a lane for a stage
  static constexpr int kStageBytes = kCopies * kThreads * 16;
  static constexpr int kStages = kTileStages;
  // After the products, the sums of all warps take the place of the stages.
  static constexpr int kPartFloats = kColumnTile * kRowTile;
  // Behind the stages are the factors of the rows.
  static constexpr int kSharedBytes = kStages * kStageBytes + kRowTile * 4;
  static constexpr int kBlocksPerSm = kSharedBytes < (100 << 10) ? 2 : 1;
  static_assert(kWarps * kPartFloats * 4 <= kStages * kStageBytes);
  static_assert(kColumnTile % kSquaredColumns == 0);
  static_assert(kColumnTile * kRowTile <= kThreads);  // as ProductOutputs::add_to_stream requires
  static_assert(kSkinnyDepth % kDepth == 0);
};

}  // namespace fovea::kernels::cuda
