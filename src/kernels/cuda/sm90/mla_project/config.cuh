// SPDX-License-Identifier: Apache-2.0
// Tiles of MLA's up-projection: 128 rows of latents by a head's keys and values. Blocks in pairs
// bring each other one half of the weights, so a tile of 33.5 MFLOP reads 256 KB out of the L2
// cache, 5.2 TB/s at 680 TFLOP/s. Alone it would be 384 KB: 7.8 TB/s, more than the L2 gives.
#pragma once

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/mla_project_params.h"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/ring.cuh"
#include "kernels/cuda/common/wgmma.cuh"

namespace fovea::kernels::cuda {

// What a block has of a head at a time. pairs: keys and values, in clusters of two blocks. sides:
// keys or values, by blocks on their own: twice as many tiles, for few rows.
enum Tile : int { pairs, sides };

constexpr int kRows = 128;         // of latents: two warpgroups of 64
constexpr int kSideColumns = 128;  // of keys, and of values
constexpr int kDepth = 64;         // of the rank in a stage: rows of 128 bytes
constexpr int kConsumers = 2;
constexpr int kGroupRows = kRows / kConsumers;
constexpr int kBoxColumns = 64;  // of staged sums: rows of 128 bytes
constexpr int kOutBoxes = 2;     // of a consumer, by turns

template <Type kElements, bool kRowsAnywhere, Tile kTile>
struct MlaProjectConfig {
  using Params = MlaProjectParams;
  static constexpr Type kType = kElements;
  static constexpr bool kGathers =
      kRowsAnywhere;  // as in a paged cache: the threads of a warpgroup copy them
  static constexpr int kBlocks =
      kTile == pairs ? 2 : 1;  // of a cluster: the same head, neighbouring rows
  static constexpr int kSides = kTile == pairs ? 2 : 1;  // of a tile
  static constexpr int kTilesOfHead = 2 / kSides;        // of the same rows
  static constexpr int kColumns = kSides * kSideColumns;
  static constexpr int kStages = kTile == pairs ? 4 : 6;  // 48 or 32 KB each
  // Beside the consumers a warp that starts copies, or a warpgroup that copies rows one by one.
  static constexpr int kProducerThreads = kGathers ? kWarpgroupThreads : 32;

  struct Stage {
    uint16_t latents[kRows][kDepth];
    uint16_t weights[kSides][kSideColumns][kDepth];  // one b operand
  };
  struct SharedMemory {
    alignas(1024) Stage stages[kStages];
    alignas(1024) uint16_t out[kConsumers][kOutBoxes][kGroupRows][kBoxColumns];
    TransactionBarrier full[kStages], empty[kStages];
  };

  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kConsumers * kWarpgroupThreads + kProducerThreads,
                                           sizeof(SharedMemory), kRows, kSideColumns};
  static_assert(sizeof(SharedMemory) <= 232448);

  __device__ static void run(const Params& params);
};

struct ProjectTile {
  int row, head;  // of this block
  int side;       // the first one it has: 0 keys, 1 values
};

// Tiles of a row tile, or a pair's two.
template <class Config>
__device__ __forceinline__ int tiles_abreast(const MlaProjectParams& params) {
  return params.heads * Config::kTilesOfHead;
}

// Tiles stand row tile by row tile, heads side by side; a cluster takes every one so many from its
// number on.
template <class Config>
__device__ __forceinline__ ProjectTile tile_at(const MlaProjectParams& params, int n) {
  const int abreast = tiles_abreast<Config>(params);
  const int rank = Config::kBlocks > 1 ? cluster_rank() : 0;
  const int within = n % abreast;
  return {(n / abreast * Config::kBlocks + rank) * kRows, within / Config::kTilesOfHead,
          within % Config::kTilesOfHead};
}

// Rows there are, tiles of them.
struct LiveTiles {
  int rows, tiles;
};
template <class Config>
__device__ __forceinline__ LiveTiles live_tiles(const MlaProjectParams& params) {
  constexpr int kAbreast = Config::kBlocks * kRows;
  const int rows = min(*params.live_rows, params.rows);
  return {rows, (rows + kAbreast - 1) / kAbreast * tiles_abreast<Config>(params)};
}

// Whether the rotary keys of the tile's rows are copied with it: once for all heads, by every
// cluster its share.
template <class Config>
__device__ __forceinline__ bool brings_rotary(const MlaProjectParams& params, int n) {
  const int abreast = tiles_abreast<Config>(params);
  return n % abreast == n / abreast % abreast;
}

// Until all blocks of the cluster have come as far. All threads.
template <class Config>
__device__ __forceinline__ void meet() {
  if constexpr (Config::kBlocks > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
}

}  // namespace fovea::kernels::cuda
