// SPDX-License-Identifier: Apache-2.0
// Tiles and shared memory of the portable MLA decode kernel.
#pragma once

#include "kernels/cuda/common/mla_params.h"
#include "kernels/cuda/common/types.cuh"
#include "kernels/mla_row.h"

namespace fovea::kernels::cuda {

// Shared memory that every GPU of the architecture gives a block. sm_86 and sm_89, which run sm_80
// code, have 99 KB, as sm_120 has.
#if __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000
constexpr int kSharedLimit = 227 << 10;
#else
constexpr int kSharedLimit = 99 << 10;
#endif

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;

// Contents of the cache: 16-bit values as queries, e4m3 values with scales stored elsewhere, or
// rows of kernels/mla_row.h.
enum Keys { rows, e4m3, fp8_rows };

template <int kLatent, int kRotary, Type kQuery, Keys kCache, int kRowTile>
struct MlaDecodeConfig {
  static_assert(kRowTile == 16 || kRowTile == 32 || kRowTile == 64);
  using Params = PortableMlaParams;
  static constexpr int kRank = kLatent;
  static constexpr int kColumns = kLatent + kRotary;
  static constexpr Type kQ = kQuery;
  static constexpr bool kFp8 = kCache != rows;
  static constexpr bool kScaled = kCache == fp8_rows;
  static_assert(!kScaled || (kLatent == kMlaRowLatent && kRotary == kMlaRowRope));
  // Operand types of the products. fp8 values become f16; the RoPE columns of scaled rows are bf16,
  // as the queries are.
  static constexpr Type kMath = kFp8 ? f16 : kQuery;
  static constexpr Type kRopeMath = kScaled ? kQuery : kMath;

  static constexpr int kRows = kRowTile;
  // Masks may have a window. With more rows there is no register for its first key.
  static constexpr bool kWindows = kRows == 16;
  static constexpr int kKeys = kSharedLimit > 99 << 10 ? 32 : 16;
  // A warp has one or two m16 tiles of rows. Warps that share rows divide their products: scores by
  // quarters of the columns and by keys, values by columns.
  static constexpr int kRowTiles = kRows == 16 ? 1 : 2;
  static constexpr int kSharing = kWarps / (kRows / (16 * kRowTiles));
  static constexpr int kColumnParts = 4;
  static constexpr int kLatentSteps = kLatent / kColumnParts / 16;
  static constexpr int kSteps = kLatentSteps + kRotary / kColumnParts / 16;
  static constexpr int kScoreKeys = kKeys / (kSharing / kColumnParts);
  static constexpr int kValueColumns = kRank / kSharing;
  static_assert(kLatent % 64 == 0 && kRotary % 64 == 0 && kValueColumns % 16 == 0);
  // Threads that share a row of the softmax, and keys of a tile that each of them has.
  static constexpr int kRowThreads = kThreads / kRows;
  static constexpr int kOwnKeys = kKeys / kRowThreads;

  static constexpr int kRowBytes = kScaled ? kMlaRowBytes : kColumns * (kFp8 ? 1 : 2);
  // Tiles of 16-bit keys that are copied or read. fp8 rows are copied to raw tiles; two more tiles
  // hold what the products read.
  static constexpr int kTiles = kFp8 ? 2 : 4;
  static constexpr int kRawTiles = kFp8 ? 3 : 0;

  using Element = uint16_t;
  struct SharedMemory {
    // 16-byte chunk c of row r is at place c ^ r % 8 of its eight.
    alignas(128) Element keys[kTiles][kKeys][kColumns];
    alignas(16) uint8_t raw[kRawTiles > 0 ? kRawTiles : 1][kRawTiles > 0 ? kKeys : 1][kRowBytes];
    // Padding puts neighbouring rows into different banks.
    alignas(16) float scores[kColumnParts][kRows][kKeys + 4];
    alignas(16) Element weights[kRows][kKeys + 8];
    float row_factor[kRows];    // factors of the accumulated values
    float key_scale[2][kKeys];  // scales of e4m3 rows with one scale each
    float raw_scale[kRawTiles > 0 ? kRawTiles : 1][kKeys];
  };
  static_assert(sizeof(SharedMemory) <= kSharedLimit);
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kThreads, sizeof(SharedMemory), kRows, kKeys};
  __device__ static void run(const Params& params);
};

}  // namespace fovea::kernels::cuda
