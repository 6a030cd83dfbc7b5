// SPDX-License-Identifier: Apache-2.0
// Sizes of the products of a few rows with their experts.
#pragma once

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/skinny_experts_params.h"

namespace fovea::kernels::cuda {

enum Product : int { gated, combined };

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kRows = kMaxSkinnyRows;

// The experts that any row chose, in ascending order, each with its slot.
struct Chosen {
  const uint16_t* gate[kMaxSkinnyChoices];  // or the only matrix
  const uint16_t* up[kMaxSkinnyChoices];
  alignas(8) int8_t choice[kMaxSkinnyChoices][kRows];  // that of each row, or -1
  int16_t expert[kMaxSkinnyChoices];                   // by slot
  int16_t id[kMaxSkinnyChoices];                       // by choice: the expert, or -1
  float factor[kMaxSkinnyChoices];                     // by choice
  int count;
};

// kColumns: columns of the weights in a tile. The warps of a block take pieces of k in turn.
template <bool kIsKn, int kColumns, int kStageCount>
struct ExpertTiles {
  static constexpr int kBlocks = kColumns / 16;   // m16 tiles of a warp
  static constexpr int kDepth = kIsKn ? 16 : 32;  // values of k in a piece
  static constexpr int kChunks = kColumns / 8;    // 16-byte chunks of a row of [k, n]
  static constexpr int kPieceBytes = kColumns * kDepth * 2;
  static constexpr int kCopies = kPieceBytes / (32 * 16);  // a lane's, for a piece
  static constexpr int kStages = kStageCount;
  static constexpr int kOutputs = kColumns / 2;  // pairs of columns of a row

  struct SharedMemory {
    union alignas(128) {
      char stages[kStages][kWarps][kPieceBytes];
      float sums[kWarps][kRows][kColumns];  // after the products
      int marks[kMaxSkinnyExperts];         // before the copies
    };
    float2 received[kMaxSkinnySplits - 1][kRows * kOutputs];
    Chosen chosen;
    int warp_counts[kWarps];
    TransactionBarrier has_received;
  };
  static constexpr int kSharedBytes = sizeof(SharedMemory);
  // A multiprocessor has 228 KB, of which each block takes one more.
  static constexpr int kMaxBlocks = 4;  // for their registers
  static constexpr int kBlocksPerSm = kSharedBytes < (228 << 10) / kMaxBlocks - 1024
                                          ? kMaxBlocks
                                          : (228 << 10) / (kSharedBytes + 1024);
  static_assert(kRows * kOutputs <= kThreads);  // a thread has one pair
  static_assert(kBlocksPerSm >= 1 && kMaxSkinnyExperts == 2 * kThreads);
};

}  // namespace fovea::kernels::cuda
