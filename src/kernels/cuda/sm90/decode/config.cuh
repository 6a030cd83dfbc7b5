// SPDX-License-Identifier: Apache-2.0
// Tiles and shared memory of the decode kernel.
#pragma once

#include "kernels/cuda/common/decode_params.h"
#include "kernels/cuda/common/hopper.cuh"
#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

// The bulk copy engine fetches boxes of 16 keys by 128 bytes of a row, and swizzles their chunks of
// 16 bytes.
constexpr int kBoxKeys = 16;
constexpr int kPieceBytes = 128;
constexpr int kMaxSharedBytes = 232448;

// Heads side by side in a stage's scales: those of all kv heads, or of eight.
constexpr int kScaleHeads = 8;

template <class C, int kPieceCount, bool kHasScales = C::kFp8>
struct StageOf {
  // The tile of each warp: [piece of the rows][key][byte].
  alignas(1024) char tiles[C::kWarps][kPieceCount][C::kTile][kPieceBytes];
  float scales[C::kStepKeys * kScaleHeads];  // [key of the step][head]
};
template <class C, int kPieceCount>
struct StageOf<C, kPieceCount, false> {
  alignas(1024) char tiles[C::kWarps][kPieceCount][C::kTile][kPieceBytes];
  static constexpr float* scales = nullptr;
};

// Of a 16-byte chunk of a key's row in a tile: eight keys' chunks lie in eight different bank
// groups.
template <class C>
__device__ inline int tile_offset(int key, int chunk) {
  return chunk / 8 * C::kTile * kPieceBytes + key * kPieceBytes + (chunk % 8 ^ key % 8) * 16;
}

template <int kDim, int kDimV, int kRows, Type kQuery, Type kCache, int kWarpCount, int kTileKeys>
struct DecodeConfig {
  static_assert(kDim % 16 == 0 && kDimV % 16 == 0 && kRows % 8 == 0 && kTileKeys % kBoxKeys == 0);
  using Params = DecodeParams;
  static constexpr int kHeadDim = kDim;
  static constexpr int kHeadDimV = kDimV;
  static constexpr int kRowTile = kRows;
  static constexpr int kWarps = kWarpCount;  // that compute
  static constexpr int kConsumers = 32 * kWarps;
  static constexpr int kTile = kTileKeys;           // keys of one step of one warp
  static constexpr int kStepKeys = kWarps * kTile;  // at most, of all warps
  static constexpr Type kQ = kQuery;
  static constexpr Type kKv = kCache;
  static constexpr bool kFp8 = type_bytes(kCache) == 1;
  // fp8 values are exact in f16, and one instruction away from it.
  static constexpr Type kMath = kFp8 ? f16 : kQuery;
  static constexpr int kColumns = kRows / 8;  // mma columns of query rows

  static constexpr int kKBytes = kDim * type_bytes(kCache);
  static constexpr int kVBytes = kDimV * type_bytes(kCache);
  static constexpr int kKPieces = (kKBytes + kPieceBytes - 1) / kPieceBytes;
  static constexpr int kVPieces = (kVBytes + kPieceBytes - 1) / kPieceBytes;
  // The results of the warps are joined eight rows at a time.
  static constexpr int kJoinPitch = kDimV + 4;

  struct Rest {
    alignas(16) float join[kWarps][8][kJoinPitch];
    float2 stats[kWarps][kRows];             // maximum in log2 units, sum
    float2 part_stats[kMostCluster][kRows];  // of the parts of the cluster's tile
    int is_last;
    int range_begin, range_end, cluster_units;  // of this CTA's DecodeRange
    int stages;                                 // of the rings, that it uses
    TransactionBarrier k_full[8], k_empty[8], v_full[8], v_empty[8];
    TransactionBarrier parts_full;  // of the cluster's tile
  };
  static constexpr int kStageBytes =
      sizeof(StageOf<DecodeConfig, kKPieces>) + sizeof(StageOf<DecodeConfig, kVPieces>);
  static constexpr int kFitting = (kMaxSharedBytes - static_cast<int>(sizeof(Rest))) / kStageBytes;
  static constexpr int kStages = kFitting < 8 ? kFitting : 8;
  // While an item is finished the copies go on. But with 192 KB on the way in large stages the
  // memory is slower (2 % at 32 x 4k, H200, 2026-11-22): only short parts of clusters have all
  // (stage_count()).
  static constexpr int kUsualStages = kStageBytes >= 64 * 1024 ? 2 : kStages;
  static_assert(kStages >= 2);

  struct SharedMemory : Rest {
    StageOf<DecodeConfig, kKPieces> k[kStages];
    StageOf<DecodeConfig, kVPieces> v[kStages];
  };

  static constexpr int kBlocksPerSm = 1;
  // Twelve warps could have 168 registers each: the warpgroup that copies gives back what it does
  // not need.
  static constexpr bool kMovesRegisters = kWarps == 8;
  static constexpr int kCopierRegisters = kDim > 128 ? 120 : 104;  // these spill nothing
  static constexpr int kConsumerRegisters = kDim > 128 ? 184 : 200;
  static constexpr int kCopiers = kMovesRegisters ? 128 : 64;
  // Warps that share a side: each begins its copies one after the other. V of fp8 by one is 2.5 %
  // faster than by two at 8 x 16k and 1 x 4k, of 16 bits 0.4 % slower at 128 x 4k (H200,
  // 2026-11-22).
  static constexpr int kKSharers = kCopiers / 64;
  static constexpr int kVSharers = kFp8 ? 1 : kKSharers;
  static constexpr KernelTraits kTraits = {kConsumers + kCopiers, sizeof(SharedMemory), kRows,
                                           kTileKeys};
  __device__ static void run(const Params& params);
};

// Keys of one step of a warp: twice as many where rows are a piece each and registers suffice.
template <int kDim, int kDimV, int kRows, Type kCache>
constexpr int decode_keys() {
  return kRows == 8 && kDim * type_bytes(kCache) <= kPieceBytes &&
                 kDimV * type_bytes(kCache) <= kPieceBytes
             ? 32
             : 16;
}

}  // namespace fovea::kernels::cuda
