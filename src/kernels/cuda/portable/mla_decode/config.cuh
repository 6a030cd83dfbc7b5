// SPDX-License-Identifier: Apache-2.0
// Tiles and shared memory of the portable MLA decode kernel.
#pragma once

#include "kernels/cuda/common/mla_params.h"
#include "kernels/cuda/common/types.cuh"
#include "kernels/mla_row.h"

namespace fovea::kernels::cuda {

// What a block may have at least: of the GPUs that run sm_80 code, sm_86 and sm_89 have 99 KB, as
// sm_120.
#if __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000
constexpr int kSharedLimit = 227 << 10;
#else
constexpr int kSharedLimit = 99 << 10;
#endif

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;

// rows: values as they are, or e4m3 under scales from outside; scaled: rows of kernels/mla_row.h.
enum Loader { rows, scaled };

template <int kLatent, int kRotary, Type kQuery, Type kCache, Loader kLoader, int kRowTile>
struct MlaDecodeConfig {
  static_assert(kRowTile == 16 || kRowTile == 32 || kRowTile == 64);
  using Params = PortableMlaParams;
  static constexpr int kRank = kLatent;
  static constexpr int kColumns = kLatent + kRotary;
  static constexpr Type kQ = kQuery;
  static constexpr bool kFp8 = kCache == f8e4m3;
  static constexpr bool kScaled = kLoader == scaled;
  static_assert(!kScaled || (kFp8 && kLatent == kMlaRowLatent && kRotary == kMlaRowRope));
  static_assert(kFp8 || kCache == kQuery);
  // What is multiplied: fp8 as f16, but RoPE columns of scaled rows, which are bf16, as the queries
  // are.
  static constexpr Type kMath = kFp8 ? f16 : kQuery;
  static constexpr Type kRopeMath = kScaled ? kQuery : kMath;

  static constexpr int kRows = kRowTile;
  // Whether masks may have a window: 64 rows have no register for where it begins (12 bytes
  // spilled).
  static constexpr bool kWindows = kRows == 16;
  static constexpr int kKeys = kSharedLimit > 99 << 10 ? 32 : 16;
  // A warp has one or two m16 tiles of rows. The warps that share rows share their products out:
  // scores by quarters of the columns, and by keys; values by columns.
  static constexpr int kRowTiles = kRows == 16 ? 1 : 2;
  static constexpr int kSharing = kWarps / (kRows / (16 * kRowTiles));
  static constexpr int kColumnParts = 4;
  static constexpr int kLatentSteps = kLatent / kColumnParts / 16;
  static constexpr int kSteps = kLatentSteps + kRotary / kColumnParts / 16;
  static constexpr int kScoreKeys = kKeys / (kSharing / kColumnParts);
  static constexpr int kValueColumns = kRank / kSharing;
  static_assert(kLatent % 64 == 0 && kRotary % 64 == 0 && kValueColumns % 16 == 0);
  // Threads that share a row of the softmax, and their keys.
  static constexpr int kRowThreads = kThreads / kRows;
  static constexpr int kOwnKeys = kKeys / kRowThreads;

  // Copies lie in 16-byte chunks; a warp copies some rows of each key tile.
  static constexpr int kWarpKeys = kKeys / kWarps;
  static constexpr int kRowLanes = 32 / kWarpKeys;
  static constexpr int kRowBytes = kScaled ? kMlaRowBytes : kColumns * type_bytes(kCache);
  static constexpr int kRowChunks = kRowBytes / 16;
  // Tiles of 16-bit keys: those being copied to, or where fp8 rows are copied elsewhere, the two
  // that products read.
  static constexpr int kTiles = kFp8 ? 2 : 4;
  static constexpr int kRawTiles = kFp8 ? 3 : 0;

  using Element = uint16_t;
  struct SharedMemory {
    // 16-byte chunk c of row r is at place c ^ r % 8 of its eight.
    alignas(128) Element keys[kTiles][kKeys][kColumns];
    alignas(16) uint8_t raw[kRawTiles > 0 ? kRawTiles : 1][kRawTiles > 0 ? kKeys : 1][kRowBytes];
    // Eight or four pads a row keep rows in different banks.
    alignas(16) float scores[kColumnParts][kRows][kKeys + 4];
    alignas(16) Element weights[kRows][kKeys + 8];
    float row_factor[kRows];    // by which accumulated values are to be multiplied
    float key_scale[2][kKeys];  // of e4m3 rows with a scale each
    float raw_scale[kRawTiles > 0 ? kRawTiles : 1][kKeys];
  };
  static_assert(sizeof(SharedMemory) <= kSharedLimit);
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kThreads, sizeof(SharedMemory), kRows, kKeys};
  __device__ static void run(const Params& params);
};

}  // namespace fovea::kernels::cuda
