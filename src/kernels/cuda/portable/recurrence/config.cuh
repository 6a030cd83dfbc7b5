// SPDX-License-Identifier: Apache-2.0
// The division of a state among threads.
#pragma once

#include "kernels/cuda/common/recurrence.cuh"

namespace fovea::kernels::cuda {

enum TokenCount { one, many };

template <Recurrence kKind_, int kColumns, TokenCount kTokens_>
struct RecurrenceShape : RowLanes<kColumns> {
  using Lanes = RowLanes<kColumns>;
  static constexpr Recurrence kKind = kKind_;
  static constexpr TokenCount kTokens = kTokens_;
  static constexpr int kWarps = 4;
  static constexpr int kRows = kColumns > 128 ? 1 : 2;  // rows of a lane
  static constexpr int kBlockRows = kWarps * Lanes::kStep * kRows;
  // Tokens that are staged at a time; those of KDA have decays, too.
  static constexpr int kTile = (kColumns > 128 ? 8 : 16) / (kKind == kda ? 2 : 1);
  // As many registers as the values of a state and of a token take.
  static constexpr int kBlocksPerSm = kColumns > 128 ? 2 : 4;
};

}  // namespace fovea::kernels::cuda
