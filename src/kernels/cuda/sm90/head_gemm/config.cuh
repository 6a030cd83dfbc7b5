// SPDX-License-Identifier: Apache-2.0
// Tiles of the products of every head: 64 or 128 rows by 128 columns of one head's matrix.
#pragma once

#include "kernels/cuda/common/division.cuh"
#include "kernels/cuda/common/hopper.cuh"
#include "kernels/cuda/common/hopper_head_gemm_params.h"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/ring.cuh"
#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/sm90/head_gemm/live_tiles.cuh"

namespace fovea::kernels::cuda {

constexpr int kConsumers = 2;
constexpr int kGroupRows = 64;  // rows of a warpgroup's products
constexpr int kTileColumns = 128;
constexpr int kDepth = 64;       // values of k in a stage
constexpr int kBoxColumns = 64;  // columns of a box: rows of 128 bytes
constexpr int kThreads = kConsumers * kWarpgroupThreads + 32;  // with a producer warp

// Named barriers: one for each consumer warpgroup.
enum NamedBarrier : int { first_consumer = 1 };

template <int kRows, bool kIsKn>
struct Tiles {
  static_assert(kRows == kGroupRows || kRows == kConsumers * kGroupRows);
  // The two warpgroups divide the rows, or with kSideBySide the columns.
  static constexpr bool kSideBySide = kRows == kGroupRows;
  static constexpr int kColumns =
      kSideBySide ? kTileColumns / kConsumers : kTileColumns;  // columns of a warpgroup
  static constexpr int kStages = kSideBySide ? 8 : 6;

  struct Stage {
    uint16_t rows[kRows][kDepth];
    // [n, k]: rows of 64 values of k. [k, n]: for each 64 columns one row for each k.
    uint16_t weights[kTileColumns / kBoxColumns][kBoxColumns][kDepth];
  };
  struct SharedMemory {
    alignas(1024) Stage stages[kStages];
    alignas(1024) uint16_t out[kConsumers][kColumns / kBoxColumns][kGroupRows][kBoxColumns];
    TransactionBarrier full[kStages], empty[kStages];
    LiveTiles<kRows> live;
  };

  __device__ __forceinline__ static int first_row(int consumer) {
    return kSideBySide ? 0 : consumer * kGroupRows;
  }
  __device__ __forceinline__ static int first_column(int consumer) {
    return kSideBySide ? consumer * kColumns : 0;
  }
};

__device__ __forceinline__ int steps(const HopperHeadGemmParams& params) {
  return (params.k + kDepth - 1) / kDepth;
}

// A block's tile. Tiles are ordered by row tile, then head, then column; a block takes every
// gridDim.x-th one. The code avoids divisions and unrolled loops, since launches are short.
struct Tile {
  int number = 0;    // among the block's tiles
  int row_tile = 0;  // among the row tiles with a live row
  int group = 0;
  int head = 0, column = 0;

  __device__ __forceinline__ explicit Tile(const HopperHeadGemmParams& params) {
    move(params, blockIdx.x);
  }
  __device__ __forceinline__ void advance(const HopperHeadGemmParams& params) {
    ++number;
    move(params, gridDim.x);
  }
  // Returns whether the tile is early: weights for all stages are loaded before it is known which
  // rows are live, and their tiles are computed in any case. There are no early tiles if skipped
  // rows decide which row tiles there are.
  template <int kStages>
  __device__ __forceinline__ bool early(const HopperHeadGemmParams& params) const {
    return !params.skip && number * steps(params) < kStages && row_tile < params.row_tiles;
  }
  template <int kStages>
  __device__ __forceinline__ bool exists(const HopperHeadGemmParams& params,
                                         int live_row_tiles) const {
    return row_tile < live_row_tiles || early<kStages>(params);
  }

 private:
  __device__ __forceinline__ void move(const HopperHeadGemmParams& params, int groups) {
    group += groups;
#pragma unroll 1
    for (; group >= params.groups; group -= params.groups) ++row_tile;
    head = short_quotient(group, params.column_tiles);
    column = (group - head * params.column_tiles) * kTileColumns;
  }
};

}  // namespace fovea::kernels::cuda
