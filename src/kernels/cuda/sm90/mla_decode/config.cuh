// SPDX-License-Identifier: Apache-2.0
// Tiles, registers and shared memory of the Hopper MLA decode kernel for 64 rows a block.
#pragma once

#include "kernels/cuda/sm90/mla_common/fp8.cuh"
#include "kernels/cuda/sm90/mla_common/work.cuh"

namespace fovea::kernels::cuda {

constexpr int kTileRows = 64;  // query rows of a block: one wgmma tile

// How many blocks have the same items. one: a row tile is 64 rows of one block. two: two
// neighbouring blocks take 64 rows each of a row tile. pairs: as two; they also join the row tiles
// that have two parts, instead of leaving them to the merge.
enum RowBlocks : int { one, two, pairs };

// Registers of a thread, by role. 512 threads share 65536.
struct RegisterCounts {
  int producer, scores, values;
};

template <int kLatentRank, int kRopeDim, Type kQuery, Keys kCache, RowBlocks kRowBlocks>
struct MlaDecodeConfig {
  using Params = MlaDecodeParams;
  static constexpr int kRank = kLatentRank;
  static constexpr Type kQ = kQuery;
  static constexpr Keys kKeys = kCache;
  static constexpr int kRows = kTileRows;
  static constexpr int kBlocks = kRowBlocks == one ? 1 : 2;
  static constexpr bool kPairs = kRowBlocks == pairs;
  static constexpr bool kFp8 = is_fp8(kCache);
  static_assert(!kFp8 || !kPairs);
  // Two blocks over the same fp8 keys form a cluster: each converts half of every key tile for
  // both.
  static constexpr bool kShares = kFp8 && kBlocks == 2;
  // Operand types of the products. e4m3 values become f16 by one instruction for two; the RoPE
  // columns of fp8_rows are bf16, as the queries are.
  static constexpr Type kMath = kFp8 ? f16 : kQuery;
  static constexpr Type kRopeMath = kCache == fp8_rows ? kQuery : kMath;

  static constexpr int kValueColumns = kRank / 2;  // columns of one value warpgroup
  static constexpr int kRopeTiles = kRopeDim / kTileColumns;
  static constexpr int kLatentTiles = kRank / kTileColumns;
  // A stage holds half of a key tile's latent columns. As many stages as fit.
  static constexpr int kTileStages = 2;
  static constexpr int kStageTiles = kLatentTiles / kTileStages;
  static constexpr int kStages = kFp8 ? 4 : 5;
  static constexpr int kRopeSlots = 1;
  static constexpr int kWeightSlots = kFp8 ? 1 : 2;
  static constexpr bool kPrefetchesFirstKeys = false;
  // The first half of the latent columns of q is in registers, so that half of the score products
  // read 64 bytes of shared memory a cycle instead of 128. Converting fp8 rows takes registers too.
  static constexpr QueryLayout kQueries = {
      .register_tiles = kFp8 ? kStageTiles - 1 : kStageTiles,
      .shared_tiles = kLatentTiles + kRopeTiles - (kFp8 ? kStageTiles - 1 : kStageTiles),
      .box_tiles = kCache == pages ? kStageTiles : 1,
      .warps = kCache == pages ? 1 : 4,
      .stages = 1};
  static constexpr int kKeyWarps = kCache == pages ? 1 : 4;  // producer warps that load keys
  // A value warpgroup's threads hold 128 accumulators, the score warpgroup's 64 registers of q and
  // 32 of scores.
  static constexpr RegisterCounts kRegisters =
      kFp8 ? RegisterCounts{72, 120, 160} : RegisterCounts{48, 144, 160};

  // fp8 rows on their way to be converted: each producer warp has some chunks of four rows.
  using Row = Fp8Row<kRank, kRopeDim, kKeys>;
  struct alignas(16) Chunk {
    uint4 rows[4][Row::kBytes / 16];
  };
  struct Fp8Memory {
    static constexpr int kChunks = 3;  // chunks of a warp
    Chunk chunks[4][kChunks];
    TransactionBarrier chunk_full[4][kChunks];
  };
  // A row tile of two parts, one in each block of the cluster.
  struct PairMemory {
    float lse[kTileRows];        // LSE of this block's part
    float2 received[kTileRows];  // LSE and unit of the other block's part
    TransactionBarrier ready;    // the other block may write values over its queries
    TransactionBarrier full;     // values of the other block have arrived
  };
  struct WeightMemory {
    alignas(1024) uint16_t weights[kWeightSlots][kTileRows][kTileColumns];
    float rescale[kWeightSlots][kTileRows];
    float inverse_sum[2][kTileRows];     // inverse sums of an item
    uint32_t rescaled[kWeightSlots][4];  // by warp: the factor of some row is not 1
    Select<kPairs, PairMemory, Nothing> pair;
    TransactionBarrier weights_full[kWeightSlots], weights_empty[kWeightSlots];
    TransactionBarrier scores_done[2], sums_full[2];
  };
  struct SharedMemory : WeightMemory, Select<kFp8, Fp8Memory, Nothing> {
    alignas(1024) KeyTiles<kStageTiles> kv[kStages];
    alignas(1024) Select<(kRopeTiles > 0), KeyTiles<1>, Nothing> rope[kRopeSlots];
    alignas(1024) uint16_t q[kQueries.shared_tiles][kTileRows][kTileColumns];
    RowTile tiles[kTileSlots];
    ProducerState next;
    TransactionBarrier tile_full[kTileSlots], tile_empty[kTileSlots];
    TransactionBarrier full[kStages], empty[kStages];
    TransactionBarrier rope_full[kRopeSlots], rope_empty[kRopeSlots];
    TransactionBarrier q_full, q_empty;
  };

  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {4 * kWarpgroupThreads, sizeof(SharedMemory),
                                           kBlocks* kRows, kTileKeys};
  static_assert(sizeof(SharedMemory) <= kMaxSharedBytes);
  __device__ static void run(const Params& params);
};

// Named barriers. Converting queries and clearing values both synchronise the score warpgroup.
enum NamedBarrier : int { score_warpgroup = 1, half_l_before_r = 4 };

}  // namespace fovea::kernels::cuda
