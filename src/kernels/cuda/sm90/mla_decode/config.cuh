// SPDX-License-Identifier: Apache-2.0
// Tiles, registers and shared memory of the Hopper MLA decode kernel.
#pragma once

#include "kernels/cuda/common/hopper.cuh"
#include "kernels/cuda/common/mla_params.h"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

constexpr int kTileRows = 64;     // query rows of a block: one wgmma tile
constexpr int kTileKeys = 64;     // keys of a step
constexpr int kTileColumns = 64;  // 16-bit columns of a 128-byte swizzled row
constexpr int kTileBytes = kTileKeys * kTileColumns * 2;
constexpr int kTileSlots = 4;  // work items that roles may be apart

// How keys reach shared memory: boxes of pages by the copy engine, or rows one by one.
enum Loader : int { pages, rows };

// What a block works on; the producer reads it from the work list and hands it to all.
struct RowTile {
  MlaItem item;
  RequestView view;
  int first_row;  // of the request's packed (token, head) rows
  int rows;       // valid ones, 0..64
  int tiles;      // key tiles of the item; -1: no more work
  int masked;     // the last ones, with keys that some row may not see
};

template <int kLatentRank, int kRopeDim, Type kQuery, Type kCache, Loader kKeyLoader,
          int kRowBlocks>
struct MlaDecodeConfig {
  using Params = MlaDecodeParams;
  static constexpr int kRank = kLatentRank;
  static constexpr int kRope = kRopeDim;
  static constexpr Type kQ = kQuery;
  static constexpr Loader kLoader = kKeyLoader;
  // Neighbouring blocks that take 64 rows each of the same items, at the same time: the second
  // reads the keys from the L2 cache. Where it reads them later, from memory, 128 heads are 40 %
  // slower (2026-11-21).
  static constexpr int kBlocks = kRowBlocks;
  static_assert(kCache == kQuery);

  static constexpr int kValueColumns = kRank / 2;  // of one value warpgroup
  static constexpr int kHalfTiles = kValueColumns / kTileColumns;
  static constexpr int kRopeTiles = kRope / kTileColumns;
  // q: the first half of the latent columns lives in registers, so that half of the score products
  // read 64 bytes a cycle of shared memory instead of all 128; the rest has its place there.
  static constexpr int kSharedQueryTiles = kHalfTiles + kRopeTiles;
  // Half tiles (the columns of one value warpgroup) in flight: two and a half key tiles, what fits.
  static constexpr int kStages = 5;

  static constexpr int kKeyWarps = kLoader == pages ? 1 : 4;
  static constexpr int kFullArrivals = kLoader == pages ? 1 : kWarpgroupThreads;
  // 512 threads share 65536 registers. Value warpgroups hold 128 accumulators and need 160; scores
  // hold 64 registers of q, 32 of scores.
  static constexpr int kProducerRegisters = 48;
  static constexpr int kScoreRegisters = 144;
  static constexpr int kValueRegisters = 160;

  struct SharedMemory {
    alignas(1024) uint16_t kv[kStages][kHalfTiles][kTileKeys][kTileColumns];
    alignas(1024) uint16_t rope[kRopeTiles ? kTileKeys : 1][kTileColumns];
    alignas(1024) uint16_t q[kSharedQueryTiles][kTileRows][kTileColumns];
    alignas(1024) uint16_t weights[2][kTileRows][kTileColumns];
    float rescale[2][kTileRows];
    float inverse_sum[2][kTileRows];
    uint32_t rescaled[2][4];  // by warp: some row's factor is not 1
    RowTile tiles[kTileSlots];
    TransactionBarrier tile_full[kTileSlots], tile_empty[kTileSlots];
    TransactionBarrier full[kStages], empty[kStages];
    TransactionBarrier rope_full, rope_empty;
    TransactionBarrier q_full, q_empty;
    TransactionBarrier weights_full[2], weights_empty[2];
  };

  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {4 * kWarpgroupThreads, sizeof(SharedMemory),
                                           kBlocks* kTileRows, kTileKeys};
  static_assert(sizeof(SharedMemory) <= 232448);
  __device__ static void run(const Params& params);
};

// Position in a ring; full barriers are waited on with `phase`, empty ones with the other.
template <int kCount>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kCount) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <class C>
__device__ __forceinline__ int block_rank() {
  return blockIdx.x % C::kBlocks;
}

// One role's way through the tiles.
template <class C>
struct TileReader {
  Ring<kTileSlots> at;
  __device__ __forceinline__ const RowTile& take(typename C::SharedMemory& shared) {
    shared.tile_full[at.stage].wait(at.phase);
    return shared.tiles[at.stage];
  }
  // One arrival a warp.
  __device__ __forceinline__ void give_back(typename C::SharedMemory& shared) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.tile_empty[at.stage].arrive();
    at.advance();
  }
};

}  // namespace fovea::kernels::cuda
