// SPDX-License-Identifier: Apache-2.0
// Tiles and shared memory of the decode kernel.
#pragma once

#include "kernels/cuda/common/decode_params.h"
#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

constexpr int power_of_two_at_least(int x) {
  int p = 1;
  while (p < x) p *= 2;
  return p;
}

template <int kDim, int kDimV, int kRows, Type kQuery, Type kCache, int kWarpCount, int kTile,
          int kStageCount, int kCtas>
struct DecodeConfig {
  static_assert(kDim % 16 == 0 && kDimV % 16 == 0 && kRows % 8 == 0 && kTile % 16 == 0);
  using Params = DecodeParams;
  static constexpr int kHeadDim = kDim;
  static constexpr int kHeadDimV = kDimV;
  static constexpr int kRowTile = kRows;
  static constexpr int kWarps = kWarpCount;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kKeys = kTile;  // keys of one step of one warp
  static constexpr int kStages = kStageCount;
  static constexpr Type kQ = kQuery;
  static constexpr Type kKv = kCache;
  static constexpr bool kFp8 = type_bytes(kCache) == 1;
  // fp8 values are exact in f16, and one instruction away from it.
  static constexpr Type kMath = kFp8 ? f16 : kQuery;
  static constexpr int kColumns = kRows / 8;  // mma columns of query rows

  static constexpr int kKBytes = kDim * type_bytes(kCache);
  static constexpr int kVBytes = kDimV * type_bytes(kCache);
  // One 16-byte chunk of padding: eight rows then start in eight different bank groups.
  static constexpr int kKPitch = kKBytes + 16;
  static constexpr int kVPitch = kVBytes + 16;
  // The results of the warps are joined through the stages they have just read, eight rows at a time.
  static constexpr int kJoinPitch = kDimV + 4;

  struct Stage {
    alignas(16) char k[kTile][kKPitch];
    alignas(16) char v[kTile][kVPitch];
    float scales[kFp8 ? 2 : 1][kFp8 ? kTile : 4];  // of K and of V, one a key
  };
  static_assert(sizeof(Stage::k) + sizeof(Stage::v) >= 8 * kJoinPitch * sizeof(float));

  struct SharedMemory {
    alignas(16) Stage stages[kWarps][kStages];
    float2 stats[kWarps][kRows];  // maximum in log2 units, sum
    int join_stage[kWarps];       // where a warp put its result
    int is_last;
  };

  static constexpr int kBlocksPerSm = kCtas;
  static constexpr KernelTraits kTraits = {kThreads, sizeof(SharedMemory), kRows, kTile};
  __device__ static void run(const Params& params);
};

// Keys of one step: two steps' worth of latency is hidden by two sub-tiles where rows are short.
template <int kDim, int kDimV, Type kCache>
constexpr int decode_keys() {
  return (kDim + kDimV) * type_bytes(kCache) <= 256 ? 32 : 16;
}

// A third stage took 1-3 % longer at every size of the grid (H200, 2026-11-21).
constexpr int kDecodeStages = 2;

}  // namespace fovea::kernels::cuda
