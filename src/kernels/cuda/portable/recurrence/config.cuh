// SPDX-License-Identifier: Apache-2.0
// The division of a state among threads. Eight lanes share a row, so one load of a warp reads
// whole lines of four rows and a sum over a row takes three shuffles.
#pragma once

#include "kernels/cuda/common/linear_params.h"
#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

enum Recurrence { delta, mamba2 };
enum TokenCount { one, many };

template <Recurrence kKind_, int kColumns, TokenCount kTokens_>
struct RecurrenceShape {
  static constexpr Recurrence kKind = kKind_;
  static constexpr TokenCount kTokens = kTokens_;
  static constexpr int kWarps = 4;
  static constexpr int kRowLanes = 8;                          // lanes that share a row
  static constexpr int kVectors = kColumns / (4 * kRowLanes);  // float4 of a lane in a row
  static constexpr int kValues = 4 * kVectors;                 // values of a lane in a row
  static constexpr int kRows = kColumns > 128 ? 1 : 2;         // rows of a lane
  static constexpr int kStep = 32 / kRowLanes;                 // rows of a warp at a time
  static constexpr int kBlockRows = kWarps * kStep * kRows;
  static constexpr int kTile = kColumns > 128 ? 8 : 16;  // tokens that are staged at a time
  // As many registers as the values of a state and of a token take.
  static constexpr int kBlocksPerSm = kColumns > 128 ? 2 : 4;
};

}  // namespace fovea::kernels::cuda
