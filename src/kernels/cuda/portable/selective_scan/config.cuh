// SPDX-License-Identifier: Apache-2.0
// The division of the states of channels among threads.
#pragma once

#include "kernels/cuda/portable/recurrence/load.cuh"

namespace fovea::kernels::cuda {

// The usual 16 columns are a float4 of each of four lanes, so a load of a warp reads whole lines.
template <int kColumns, TokenCount kTokens_>
struct ScanShape {
  static constexpr TokenCount kTokens = kTokens_;
  static constexpr int kRowLanes = kColumns > 16 ? 8 : 4;      // lanes that share a channel
  static constexpr int kVectors = kColumns / (4 * kRowLanes);  // float4 of a lane in a row
  static constexpr int kValues = 4 * kVectors;                 // values of a lane in a row
  static constexpr int kStep = 32 / kRowLanes;                 // channels of a warp
  static constexpr int kRows = 1;                              // channels of a lane
  static constexpr int kWarps = 4;
  static constexpr int kBlockRows = kWarps * kStep * kRows;
  static constexpr int kTile = kColumns > 64 ? 8 : 16;  // tokens that are staged at a time
  // As many registers as the values of a state, of its decays and of a token take.
  static constexpr int kBlocksPerSm = kColumns > 64 ? 2 : 4;
};

}  // namespace fovea::kernels::cuda
