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
// Keys lie in groups of 8, of each all column tiles one after the other: any page of 8 keys and
// more is a box of the copy engine.
constexpr int kGroupKeys = 8;
constexpr int kGroupTileBytes = kGroupKeys * kTileColumns * 2;
constexpr int kTileSlots = 4;  // work items that roles may be apart
// Of blocks of 16 rows: all threads but the producer's meet here.
constexpr int kConsumerThreads = 2 * kWarpgroupThreads;
constexpr int kConsumersBarrier = 1;

// How keys reach shared memory: boxes of pages by the copy engine, or rows one by one. fp8 caches:
// rows of plain elements, or with a scale for each 128 columns (KvLayout::mla_fp8_rows).
enum Loader : int { pages, rows, scaled };

// A where kFirst, else B.
template <bool kFirst, class A, class B>
struct Selected {
  using Type = A;
};
template <class A, class B>
struct Selected<false, A, B> {
  using Type = B;
};
template <bool kFirst, class A, class B>
using Select = typename Selected<kFirst, A, B>::Type;

// kTiles column tiles of 64 keys.
template <int kTiles>
struct KeyTiles {
  uint16_t groups[kTileKeys / kGroupKeys][kTiles][kGroupKeys][kTileColumns];
  static constexpr int kGroupBytes = kTiles * kGroupTileBytes;

  __device__ __forceinline__ uint16_t (&row(int tile, int key))[kTileColumns] {
    return groups[key / kGroupKeys][tile][key % kGroupKeys];
  }
};

// What a block works on; the producer reads it from the work list and hands it to all.
struct RowTile {
  MlaItem item;
  RequestView view;
  int first_row;  // of the request's packed (token, head) rows
  int rows;       // valid ones, 0..64
  int tiles;      // key tiles of the item; -1: no more work
  int masked;     // the last ones, with keys that some row may not see
  bool paired;    // of a row tile of two parts, which are joined here
};

// A part that the block has stored, of a row tile that is still to be joined.
struct OpenPart {
  int q_begin, first_row, rows;  // as MlaItem, RowTile
  int partial;                   // as MlaItem
  uint32_t state;                // of the counter before this part; then whose rows to join
};

template <int kLatentRank, int kRopeDim, Type kQuery, Type kCache, Loader kKeyLoader,
          int kRowsOfBlock, int kRowBlocks, int kJoins>
struct MlaDecodeConfig {
  using Params = MlaDecodeParams;
  static constexpr int kRank = kLatentRank;
  static constexpr int kRope = kRopeDim;
  static constexpr Type kQ = kQuery;
  static constexpr Loader kLoader = kKeyLoader;
  static constexpr int kRows = kRowsOfBlock;  // query rows of a block: 64 or 16
  static constexpr bool kSixteen = kRows == 16;
  static_assert(kSixteen || kRows == kTileRows);
  // Neighbouring blocks that take 64 rows each of the same items, at the same time: the second
  // reads the keys from the L2 cache. Where it reads them later, from memory, 128 heads are 40 %
  // slower (2026-11-21).
  static constexpr int kBlocks = kRowBlocks;
  // Whether clusters of two blocks join row tiles of two parts (pair_join.cuh), or those of any
  // number, in clusters (cluster_join.cuh) or not (join.cuh), instead of leaving them to the merge.
  static constexpr bool kPairs = kJoins == 1;
  static constexpr bool kClusters = kJoins == 2;
  static constexpr bool kJoinsParts = kJoins == 3;
  static_assert(!kPairs || (!kSixteen && kBlocks == 2));
  static_assert(!kJoinsParts || kSixteen);
  static_assert(!kClusters || (kSixteen && kBlocks == 1));
  static constexpr bool kFp8 = kCache == f8e4m3;
  static constexpr bool kScaled = kLoader == scaled;
  // Two blocks over the same fp8 keys are a cluster: each converts half of every key tile for both.
  static constexpr bool kShares = kFp8 && kBlocks == 2;
  static constexpr int kSharers = kShares ? 2 : 1;
  // What is multiplied. e4m3 is f16 by one instruction, two values each; RoPE columns of scaled
  // rows, which are bf16, as the queries are.
  static constexpr Type kMath = kFp8 ? f16 : kQuery;
  static constexpr Type kRopeMath = kScaled ? kQuery : kMath;
  static_assert(!kFp8 || !kSixteen);  // NarrowFp8Config
  static_assert(kFp8 ? kLoader != pages : kCache == kQuery && !kScaled);

  static constexpr int kValueColumns = kRank / 2;  // of one value warpgroup
  static constexpr int kHalfTiles = kValueColumns / kTileColumns;
  static constexpr int kRopeTiles = kRope / kTileColumns;
  static constexpr int kLatentTiles = 2 * kHalfTiles;
  // q: of blocks of 64 rows, the first half of the latent columns lives in registers, so that half
  // of the score products read 64 bytes a cycle of shared memory instead of all 128; the rest has
  // its place there. Converting fp8 rows takes registers too.
  static constexpr int kRegisterTiles = kSixteen ? 0 : kFp8 ? kHalfTiles - 1 : kHalfTiles;
  static constexpr int kQueryTiles = kLatentTiles + kRopeTiles - kRegisterTiles;
  // Of latent queries, in a box that has all rows: what lies side by side; who copies rows has no
  // registers for more than one.
  static constexpr int kQueryBoxTiles = kSixteen ? kLatentTiles : kLoader == pages ? kHalfTiles : 1;
  // Warps that ask for these boxes.
  static constexpr int kQueryWarps = kLoader == pages || kSixteen ? 1 : 4;
  // Column tiles of a stage, and stages in flight: as many as fit.
  static constexpr int kStageTiles = kSixteen ? 2 : kHalfTiles;
  static constexpr int kGroupBytes = KeyTiles<kStageTiles>::kGroupBytes;
  static constexpr int kHalfStages = kHalfTiles / kStageTiles;
  static constexpr int kQueryStages = kSixteen ? 0 : 1;
  static constexpr int kStages = kClusters ? 9 : kSixteen ? 11 : kFp8 ? 4 : 5;
  static constexpr int kRopeSlots = kSixteen ? 2 : 1;
  static constexpr int kSlots = kFp8 ? 1 : 2;  // of weights

  // Producer warps that bring keys; converting keeps them busy.
  static constexpr int kKeyWarps = kLoader == pages ? 1 : 4;
  static constexpr int kFullArrivals = kLoader == pages ? 1 : kFp8 ? kKeyWarps : kWarpgroupThreads;
  // fp8 rows on their way: a warp has 16 of a key tile, of a shared one 8, in groups of four.
  static constexpr int kChunks = 3;  // groups of a warp
  static constexpr int kWarpRows = kTileKeys / kSharers / kKeyWarps;
  static_assert(!kShares || kWarpRows == kGroupKeys);
  static constexpr int kWarpGroups = kWarpRows / 4;
  // Where all groups of a tile are there at a time, half L of all is converted first: its stage
  // comes free first.
  static constexpr int kPasses = kShares && kRank == 512 ? 2 : 1;
  static constexpr int kLatentParts = kRank / 128;
  static constexpr int kRopeOffset = kScaled ? kRank + kLatentParts * 4 : kRank;
  static constexpr int kRopeBytes = kScaled ? 2 * kRope : kRope;
  static constexpr int kRowBytes = kRopeOffset + kRopeBytes;
  struct alignas(16) Chunk {
    uint4 rows[4][kRowBytes / 16];
  };
  // 512 threads share 65536 registers. Value warpgroups hold 128 accumulators and need 160; scores
  // hold 64 registers of q, 32 of scores.
  static constexpr int kProducerRegisters = kFp8 ? 72 : 48;
  static constexpr int kScoreRegisters = kFp8 ? 120 : 144;
  static constexpr int kValueRegisters = 160;

  // 384 threads of blocks of 16 rows: 64 of q, 32 accumulators, 16 of scores.
  static constexpr int kSixteenProducerRegisters = 72;
  static constexpr int kSixteenRegisters = 208;

  static constexpr int kConsumers = kSixteen ? 2 : 3;  // warpgroups

  // Of blocks of 16 rows.
  static constexpr int kConsumerWarps = kConsumerThreads / 32;
  static constexpr int kWarpColumns = kRank / kConsumerWarps;  // of values

  // What only blocks of 16 rows have, of 64.
  struct SixteenMemory {
    alignas(1024) uint16_t weights[kRows][kTileColumns];
    float given[2][4][32][4];  // scores of one half of the columns, for the other's warps
    alignas(16) float maxima[kRows][kConsumerWarps];
    float sums[kRows][kConsumerWarps];
  };
  struct Nothing {};
  // Of a row tile of two parts.
  struct PairMemory {
    float lse[kTileRows];        // of the own part
    float2 received[kTileRows];  // LSE and unit of the other's
    TransactionBarrier ready;    // the other block takes values where its queries were
    TransactionBarrier full;
  };
  struct WideMemory {
    alignas(1024) uint16_t weights[kSlots][kTileRows][kTileColumns];
    float rescale[kSlots][kTileRows];
    float inverse_sum[2][kTileRows];  // of an item
    uint32_t rescaled[kSlots][4];     // by warp: some row's factor is not 1
    Select<kPairs, PairMemory, Nothing> pair;
    TransactionBarrier weights_full[kSlots], weights_empty[kSlots];
    TransactionBarrier scores_done[2], sums_full[2];
  };
  struct Fp8Memory {
    Chunk chunks[kKeyWarps][kChunks];
    TransactionBarrier chunk_full[kKeyWarps][kChunks];
  };
  // A row of a part: sums of weighted values as f16, in multiples of a power of two for each warp's
  // columns. Rows are so far apart that lanes which store what they have of eight rows use all
  // banks.
  struct alignas(16) PartRow {
    uint16_t values[kRank];
    float units[kConsumerWarps];
    float sums[kConsumerWarps];  // of weights relative to 2^most, of each warp's keys
    float most;
    float unused[3];
  };
  static_assert(sizeof(PartRow) % 128 == 80);
  struct ClusterMemory {
    PartRow own[kRows];     // of the block's part, those that other blocks join
    PartRow joined[kRows];  // [members of the group, rows of this block]
    TransactionBarrier parts_full;
    bool last[kRows];  // whether the other clusters' parts of a row are stored
  };
  struct JoinMemory {
    OpenPart open[2];  // the first and the last item of a block may be parts
  };
  struct SharedMemory : Select<kSixteen, SixteenMemory, WideMemory>,
                        Select<kFp8, Fp8Memory, Nothing> {
    alignas(1024) KeyTiles<kStageTiles> kv[kStages];
    alignas(1024) Select<(kRopeTiles > 0), KeyTiles<1>, Nothing> rope[kRopeSlots];
    alignas(1024) uint16_t q[kQueryTiles][kRows][kTileColumns];
    RowTile tiles[kTileSlots];
    Select<kClusters, ClusterMemory, Nothing> cluster;
    Select<kJoinsParts, JoinMemory, Nothing> join;
    struct {
      int index, end, step, rank;
      uint32_t q_phase[4];  // of warps
    } next;                 // what a producer knows and has no registers for
    TransactionBarrier tile_full[kTileSlots], tile_empty[kTileSlots];
    TransactionBarrier full[kStages], empty[kStages];
    TransactionBarrier rope_full[kRopeSlots], rope_empty[kRopeSlots];
    TransactionBarrier q_full, q_empty;
  };

  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {(1 + kConsumers) * kWarpgroupThreads,
                                           sizeof(SharedMemory), kBlocks* kRows, kTileKeys};
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
  __device__ __forceinline__ void advance(int steps) {
    stage += steps;
    phase ^= stage / kCount & 1;
    stage %= kCount;
  }
};

template <class C>
__device__ __forceinline__ int block_worker() {
  return blockIdx.x / C::kBlocks;
}
// Which of the blocks that have the same items this one is; of pairs the plan says.
template <class C>
__device__ __forceinline__ int block_rank() {
  static_assert(!C::kPairs);
  return blockIdx.x % C::kBlocks;
}
template <class C>
__device__ __forceinline__ const MlaRange& block_range(const MlaDecodeParams& params) {
  return params.ranges[C::kPairs ? static_cast<int>(blockIdx.x) : block_worker<C>()];
}

// Where a row of the block's part stands, in rows of the partial results.
template <class C>
__device__ __forceinline__ int64_t part_row(const RowTile& tile, int row) {
  const MlaItem& item = tile.item;
  int slot = item.partial;
  if constexpr (C::kJoinsParts) {
    slot = slot_of_worker(block_worker<C>(), first_of_parts(item.partial));
  }
  const int first = tile.first_row - item.first_row;
  return static_cast<int64_t>(slot) * (C::kBlocks * C::kRows) + first + row;
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
