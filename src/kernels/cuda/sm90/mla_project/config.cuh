// SPDX-License-Identifier: Apache-2.0
// Tiles of MLA's up-projection: 128 rows of latents by a head's keys and values. The blocks of a
// pair load one half of the weights each for both, because a block that loads all of them would
// need more bandwidth than the L2 cache has.
#pragma once

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/mla_project_params.h"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/ring.cuh"
#include "kernels/cuda/common/wgmma.cuh"

namespace fovea::kernels::cuda {

// The part of a head that a tile holds. pairs: keys and values, in clusters of two blocks. sides:
// keys or values, by single blocks: twice as many tiles, for few rows.
enum Tile : int { pairs, sides };

constexpr int kRows = 128;         // rows of latents: two warpgroups of 64
constexpr int kSideColumns = 128;  // columns of keys, and of values
constexpr int kDepth = 64;         // columns of latents in a stage: rows of 128 bytes
constexpr int kConsumers = 2;
constexpr int kGroupRows = kRows / kConsumers;
constexpr int kBoxColumns = 64;  // columns of a box of sums: rows of 128 bytes
constexpr int kOutBoxes = 2;     // boxes of a consumer, used alternately

// Named barriers: one for each consumer warpgroup.
enum NamedBarrier : int { first_consumer = 1 };

template <Type kElements, bool kRowsAnywhere, Tile kTile>
struct MlaProjectConfig {
  using Params = MlaProjectParams;
  static constexpr Type kType = kElements;
  // Rows are stored anywhere, as in a paged cache; the threads of a warpgroup copy them.
  static constexpr bool kGathers = kRowsAnywhere;
  // Blocks of a cluster, which have the same head and neighbouring rows.
  static constexpr int kBlocks = kTile == pairs ? 2 : 1;
  static constexpr int kSides = kTile == pairs ? 2 : 1;  // keys, values: how many a tile holds
  static constexpr int kTilesOfHead = 2 / kSides;        // tiles of the same rows
  static constexpr int kColumns = kSides * kSideColumns;
  static constexpr int kStages = kTile == pairs ? 4 : 6;  // 48 or 32 KB each
  // A producer warp that starts copies, or a warpgroup that copies rows one by one.
  static constexpr int kProducerThreads = kGathers ? kWarpgroupThreads : 32;

  struct Stage {
    uint16_t latents[kRows][kDepth];
    uint16_t weights[kSides][kSideColumns][kDepth];  // one right operand
  };
  struct SharedMemory {
    alignas(1024) Stage stages[kStages];
    alignas(1024) uint16_t out[kConsumers][kOutBoxes][kGroupRows][kBoxColumns];
    TransactionBarrier full[kStages], empty[kStages];
  };

  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kConsumers * kWarpgroupThreads + kProducerThreads,
                                           sizeof(SharedMemory), kRows, kSideColumns};
  static_assert(sizeof(SharedMemory) <= kMaxSharedBytes);

  __device__ static void run(const Params& params);
};

struct ProjectTile {
  int row, head;  // first row, and head, of this block
  int side;       // the first side of the tile: 0 keys, 1 values
};

// Returns the tiles of a row tile, or of the two row tiles of a pair.
template <class Config>
__device__ __forceinline__ int tiles_abreast(const MlaProjectParams& params) {
  return params.heads * Config::kTilesOfHead;
}

// Returns tile n. Tiles are ordered by row tile, then head; a cluster takes every gridDim.x /
// kBlocks- th one, starting at its number.
template <class Config>
__device__ __forceinline__ ProjectTile tile_at(const MlaProjectParams& params, int n) {
  const int abreast = tiles_abreast<Config>(params);
  const int rank = Config::kBlocks > 1 ? cluster_rank() : 0;
  const int within = n % abreast;
  return {(n / abreast * Config::kBlocks + rank) * kRows, within / Config::kTilesOfHead,
          within % Config::kTilesOfHead};
}

// The live rows and their tiles.
struct LiveTiles {
  int rows, tiles;
};
template <class Config>
__device__ __forceinline__ LiveTiles live_tiles(const MlaProjectParams& params) {
  constexpr int kAbreast = Config::kBlocks * kRows;
  const int rows = min(*params.live_rows, params.rows);
  return {rows, (rows + kAbreast - 1) / kAbreast * tiles_abreast<Config>(params)};
}

// Returns whether the rotary keys of the tile's rows are copied with this tile: once for all heads,
// distributed among the clusters.
template <class Config>
__device__ __forceinline__ bool brings_rotary(const MlaProjectParams& params, int n) {
  const int abreast = tiles_abreast<Config>(params);
  return n % abreast == n / abreast % abreast;
}

// Synchronises all threads of the cluster.
template <class Config>
__device__ __forceinline__ void sync_blocks() {
  if constexpr (Config::kBlocks > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
}

}  // namespace fovea::kernels::cuda
