// SPDX-License-Identifier: Apache-2.0
// Tiles of the products of every head: 64 or 128 rows by 128 columns of one head's matrix.
#pragma once

#include "kernels/cuda/common/hopper.cuh"
#include "kernels/cuda/common/hopper_head_gemm_params.h"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/sm90/head_gemm/live_tiles.cuh"

namespace fovea::kernels::cuda {

constexpr int kConsumers = 2;
constexpr int kGroupRows = 64;   // of a warpgroup's products
constexpr int kTileColumns = 128;
constexpr int kDepth = 64;       // of k in a stage
constexpr int kBoxColumns = 64;  // rows of 128 bytes
constexpr int kThreads = kConsumers * kWarpgroupThreads + 32;  // and a producer warp

template <int kRows, bool kIsKn>
struct Tiles {
  static_assert(kRows == kGroupRows || kRows == kConsumers * kGroupRows);
  // Two warpgroups have half of the rows each, or of the columns.
  static constexpr bool kSideBySide = kRows == kGroupRows;
  static constexpr int kColumns = kSideBySide ? kTileColumns / kConsumers : kTileColumns;  // of a warpgroup
  static constexpr int kStages = kSideBySide ? 8 : 6;

  struct Stage {
    uint16_t rows[kRows][kDepth];
    // [n, k]: rows of 64 values of k. [k, n]: for each 64 columns a row of them for each k.
    uint16_t weights[kTileColumns / kBoxColumns][kBoxColumns][kDepth];
  };
  struct SharedMemory {
    alignas(1024) Stage stages[kStages];
    alignas(1024) uint16_t out[kConsumers][kColumns / kBoxColumns][kGroupRows][kBoxColumns];
    TransactionBarrier full[kStages], empty[kStages];
    LiveTiles<kRows> live;
  };

  __device__ __forceinline__ static int first_row(int consumer) { return kSideBySide ? 0 : consumer * kGroupRows; }
  __device__ __forceinline__ static int first_column(int consumer) { return kSideBySide ? consumer * kColumns : 0; }
};

// Position in the ring; full barriers are waited on with `phase`, empty ones with the other.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Tiles stand row tile by row tile, of each head by head; a block takes every gridDim.x-th. Its n-th:
struct Tile {
  int row_tile;  // of those with a live row
  int head, column;
};
__device__ __forceinline__ Tile tile_of_block(const HopperHeadGemmParams& params, int n) {
  const int number = static_cast<int>(blockIdx.x + n * gridDim.x);
  const int group = number % params.groups;
  return {number / params.groups, group / params.column_tiles, group % params.column_tiles * kTileColumns};
}

__device__ __forceinline__ int steps(const HopperHeadGemmParams& params) { return (params.k + kDepth - 1) / kDepth; }

// How many tiles a block has of so many row tiles.
__device__ __forceinline__ int tiles_of_block(const HopperHeadGemmParams& params, int row_tiles) {
  const int behind = row_tiles * params.groups - static_cast<int>(blockIdx.x);
  return behind > 0 ? (behind + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x) : 0;
}

// Stages that are asked for before it is known which rows are alive: all that a block has use for, but none where that
// decides which row tiles there are.
template <int kStages>
__device__ __forceinline__ int early_steps(const HopperHeadGemmParams& params) {
  return params.skip ? 0 : min(tiles_of_block(params, params.row_tiles) * steps(params), kStages);
}

}  // namespace fovea::kernels::cuda
