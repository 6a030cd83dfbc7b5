// SPDX-License-Identifier: Apache-2.0
// The division of a state among threads.
#pragma once

#include "kernels/cuda/common/recurrence.cuh"

namespace fovea::kernels::cuda {

// Tokens of a request: one, straight from memory; a few, or any number, from shared memory.
enum TokenCount { one, few, many };

template <Recurrence kKind_, int kColumns, TokenCount kTokens_>
struct RecurrenceShape : RowLanes<kColumns> {
  using Lanes = RowLanes<kColumns>;
  static constexpr Recurrence kKind = kKind_;
  static constexpr TokenCount kTokens = kTokens_;
  static constexpr int kWarps = 4;
  static constexpr int kRows = kColumns > 128 ? 1 : 2;  // rows of a lane
  static constexpr int kBlockRows = kWarps * Lanes::kStep * kRows;
  static constexpr bool kWide = kColumns > 128;
  // Tokens that are staged at a time; those of KDA have decays, too.
  static constexpr int kTile =
      kTokens == few ? (kWide && kKind == kda ? 4 : 8) : (kWide ? 8 : 16) / (kKind == kda ? 2 : 1);
  // As many registers as the values of a state and of a token take.
  // Before Hopper a fifth block would spill registers.
  static constexpr bool kIsSmall =
      kTokens == few && kColumns == 128 && kKind != kda && __CUDA_ARCH__ >= 900;
  static constexpr int kBlocksPerSm = kWide ? 2 : kIsSmall ? 5 : 4;
};

}  // namespace fovea::kernels::cuda
