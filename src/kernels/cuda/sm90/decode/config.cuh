// SPDX-License-Identifier: Apache-2.0
// Tiles and shared memory of the decode kernel.
#pragma once

#include "kernels/cuda/common/decode_params.h"
#include "kernels/cuda/common/hopper.cuh"
#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

// The bulk copy engine copies boxes of 16 keys by 128 bytes of a row and swizzles their 16-byte
// chunks.
constexpr int kBoxKeys = 16;
constexpr int kPieceBytes = 128;

// Heads with adjacent scales in a stage: all kv heads, or eight of them.
constexpr int kScaleHeads = 8;

template <class C, int kPieceCount, bool kHasScales = C::kFp8>
struct StageOf {
  // The tile of each warp: [piece of a row][key][byte].
  alignas(1024) char tiles[C::kWarps][kPieceCount][C::kTile][kPieceBytes];
  float scales[C::kStepKeys * kScaleHeads];  // [key of the step][head]
};
template <class C, int kPieceCount>
struct StageOf<C, kPieceCount, false> {
  alignas(1024) char tiles[C::kWarps][kPieceCount][C::kTile][kPieceBytes];
  static constexpr float* scales = nullptr;
};

// Returns the offset of a 16-byte chunk of a key's row in a tile. The same chunk of eight keys lies
// in eight different bank groups.
template <class C>
__device__ inline int tile_offset(int key, int chunk) {
  return chunk / 8 * C::kTile * kPieceBytes + key * kPieceBytes + (chunk % 8 ^ key % 8) * 16;
}

// Returns the keys of one step of a warp: twice as many if a row is one piece and registers
// suffice.
template <int kDim, int kDimV, int kRows, Type kCache>
constexpr int decode_keys() {
  return kRows == 8 && kDim * type_bytes(kCache) <= kPieceBytes &&
                 kDimV * type_bytes(kCache) <= kPieceBytes
             ? 32
             : 16;
}

template <int kDim, int kDimV, int kRows, Type kQuery, Type kCache>
struct DecodeConfig {
  static_assert(kDim % 16 == 0 && kDimV % 16 == 0 && kRows % 8 == 0);
  using Params = DecodeParams;
  static constexpr int kHeadDim = kDim;
  static constexpr int kHeadDimV = kDimV;
  static constexpr int kRowTile = kRows;
  static constexpr int kWarps = decode_warps(kDim, kDimV, kRows);  // warps that compute
  static constexpr int kConsumers = 32 * kWarps;
  static constexpr int kTile =
      decode_keys<kDim, kDimV, kRows, kCache>();    // keys of one step of one warp
  static constexpr int kStepKeys = kWarps * kTile;  // keys of one step of all warps, at most
  static constexpr Type kQ = kQuery;
  static constexpr Type kKv = kCache;
  static constexpr bool kFp8 = type_bytes(kCache) == 1;
  // One instruction converts fp8 values to f16, exactly.
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
    float2 stats[kWarps][kRows];            // maximum in log2 units, sum
    float2 part_stats[kMaxCluster][kRows];  // as stats, for the parts of the cluster's tile
    int is_last;
    int range_begin, range_end, cluster_units;  // from this CTA's DecodeRange
    int stages;                                 // stages of the rings that this CTA uses
    TransactionBarrier k_full[8], k_empty[8], v_full[8], v_empty[8];
    TransactionBarrier parts_full;  // all parts of the cluster's tile have arrived
  };
  static constexpr int kStageBytes =
      sizeof(StageOf<DecodeConfig, kKPieces>) + sizeof(StageOf<DecodeConfig, kVPieces>);
  static constexpr int kFitting = (kMaxSharedBytes - static_cast<int>(sizeof(Rest))) / kStageBytes;
  static constexpr int kStages = kFitting < 8 ? kFitting : 8;
  // Copies go on while an item is finished. With large stages two of them are enough (chosen on
  // H200, 2026-11-22: 2 % faster than three); short parts of clusters use all (stage_count()).
  static constexpr int kUsualStages = kStageBytes >= 64 * 1024 ? 2 : kStages;
  static_assert(kStages >= 2);

  struct SharedMemory : Rest {
    StageOf<DecodeConfig, kKPieces> k[kStages];
    StageOf<DecodeConfig, kVPieces> v[kStages];
  };

  static constexpr int kBlocksPerSm = 1;
  // Twelve warps have 168 registers each; the copying warpgroup gives back registers that it does
  // not need.
  static constexpr bool kMovesRegisters = kWarps == 8;
  static constexpr int kCopierRegisters = kDim > 128 ? 120 : 104;  // these spill nothing
  static constexpr int kConsumerRegisters = kDim > 128 ? 184 : 200;
  static constexpr int kCopiers = kMovesRegisters ? 128 : 64;
  // Warps that share the copies of K or V, since one warp starts copies one after another (chosen
  // on H200, 2026-11-22: one warp for V of fp8 is up to 2.5 % faster than two).
  static constexpr int kKSharers = kCopiers / 64;
  static constexpr int kVSharers = kFp8 ? 1 : kKSharers;
  static constexpr KernelTraits kTraits = {kConsumers + kCopiers, sizeof(SharedMemory), kRows,
                                           kTile};
  __device__ static void run(const Params& params);
};

}  // namespace fovea::kernels::cuda
