// SPDX-License-Identifier: Apache-2.0
// Shared memory and registers of blocks of 16 or 32 query rows over fp8 caches.
#pragma once

#include "kernels/cuda/sm90/mla_decode/config.cuh"

namespace fovea::kernels::cuda {

template <int kLatentRank, int kRopeDim, Type kQuery, Loader kKeyLoader, int kRowsOfBlock>
struct NarrowFp8Config {
  using Params = MlaDecodeParams;
  static constexpr int kRank = kLatentRank;
  static constexpr int kRope = kRopeDim;
  static constexpr Type kQ = kQuery;
  static constexpr int kRows = kRowsOfBlock;
  static constexpr bool kPairs = false;
  static constexpr bool kJoinsParts = false;
  static constexpr bool kClusters = false;
  static constexpr bool kSixteen = false;
  static constexpr int kBlocks = 1;
  static constexpr bool kFp8 = true;
  static constexpr Loader kLoader = kKeyLoader;
  static constexpr bool kScaled = kLoader == scaled;
  static constexpr Type kMath = f16;
  static constexpr Type kRopeMath = kScaled ? kQuery : f16;
  static_assert(kKeyLoader != pages);

  static constexpr int kLatentTiles = kRank / kTileColumns;
  static constexpr int kRopeTiles = kRope / kTileColumns;
  static constexpr int kLatentParts = kRank / 128;
  static constexpr int kRopeOffset = kScaled ? kRank + kLatentParts * 4 : kRank;
  static constexpr int kRowBytes = kRopeOffset + (kScaled ? 2 * kRope : kRope);
  // As load_queries and produce_queries know them: all of q has its place, a tile of keys is a
  // stage.
  static constexpr int kRegisterTiles = 0;
  static constexpr int kQueryTiles = kLatentTiles + kRopeTiles;
  static constexpr int kQueryBoxTiles = kLatentTiles;
  static constexpr int kQueryWarps = 1;
  static constexpr int kQueryStages = 0;
  static constexpr int kStageTiles = 1;
  static constexpr int kHalfStages = 1;
  static constexpr int kStages =
      4;  // even: each belongs to one warpgroup, whose phases stay in step

  // Left operands on their way, of 64 columns; fp8 is read ahead of them where registers allow.
  static constexpr int kBuffers = kRows == 16 ? 3 : 1;
  static constexpr bool kAhead = kRows == 16;
  // Values that the warpgroups exchange at a time, of a thread.
  static constexpr int kExchanged = kRows == 16 ? 32 : 8;

  struct KeyRows {
    uint4 rows[kTileKeys][kRowBytes / 16];
  };
  struct SharedMemory {
    alignas(1024) uint16_t q[kQueryTiles][kRows][kTileColumns];
    alignas(1024) uint16_t weights[2][kRows][kTileColumns];
    alignas(128) KeyRows kv[kStages];
    alignas(16) uint16_t scales[2][4][kTileKeys];
    float exchange[2][kExchanged][kWarpgroupThreads];
    float maxima[2][4][kRows];
    float sums[2][4][kRows];
    RowTile tiles[kTileSlots];
    TransactionBarrier tile_full[kTileSlots], tile_empty[kTileSlots];
    TransactionBarrier full[kStages], empty[kStages];
    TransactionBarrier q_full, q_empty;
  };

  // Together what 384 threads of 168 begin with.
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {3 * kWarpgroupThreads, sizeof(SharedMemory), kRows,
                                           kTileKeys};
  static_assert(sizeof(SharedMemory) <= 232448);
  __device__ static void run(const Params& params);
};

}  // namespace fovea::kernels::cuda
