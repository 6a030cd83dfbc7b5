// SPDX-License-Identifier: Apache-2.0
// Tiles of the products of every head: 64 or 128 rows by 128 columns of one head's matrix.
#pragma once

#include "kernels/cuda/common/hopper.cuh"
#include "kernels/cuda/common/hopper_head_gemm_params.h"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/wgmma.cuh"

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

// Tiles stand row tile by row tile, of each head by head; a block takes every gridDim.x-th.
struct Tile {
  int row, head, column;
};
template <int kRows>
__device__ __forceinline__ Tile tile_at(const HopperHeadGemmParams& params, int n) {
  const int group = n % params.groups;
  return {n / params.groups * kRows, group / params.column_tiles, group % params.column_tiles * kTileColumns};
}

__device__ __forceinline__ int steps(const HopperHeadGemmParams& params) { return (params.k + kDepth - 1) / kDepth; }

// How many tiles of the block, of `all` there are: those with a live row, and those whose weights are asked for before
// it is known which rows are alive.
template <int kRows, int kStages>
__device__ __forceinline__ int tiles_of_block(const HopperHeadGemmParams& params, int live) {
  const auto of_block = [&](int tiles) {
    const int behind = tiles - static_cast<int>(blockIdx.x);
    return behind > 0 ? (behind + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x) : 0;
  };
  const int all = of_block(params.row_tiles * params.groups);
  const int early = (kStages + steps(params) - 1) / steps(params);
  return max(of_block((live + kRows - 1) / kRows * params.groups), min(all, early));
}

}  // namespace fovea::kernels::cuda
