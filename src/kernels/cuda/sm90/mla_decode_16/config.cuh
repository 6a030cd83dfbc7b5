// SPDX-License-Identifier: Apache-2.0
// Tiles, registers and shared memory of the Hopper MLA decode kernel for 16 rows a block.
#pragma once

#include "kernels/cuda/sm90/mla_common/work.cuh"

namespace fovea::kernels::cuda {

// How the parts of a row tile are joined: by the blocks that computed them, through global memory
// (block_join.cuh), or in clusters, through shared memory (cluster_join.cuh).
enum Joins : int { blocks, clusters };

constexpr int kTileRows = 16;                            // query rows of a block
constexpr int kConsumerThreads = 2 * kWarpgroupThreads;  // all threads but the producer's
constexpr int kConsumerWarps = kConsumerThreads / 32;

// A part that the block has stored, of a row tile that is still to be joined.
struct OpenPart {
  int q_begin, first_row, rows;  // as MlaItem, RowTile
  int partial;                   // as MlaItem
  uint32_t state;                // the counter before this part; then which rows the block joins
};

template <int kLatentRank, int kRopeDim, Type kQuery, Keys kCache, Joins kJoinedBy>
struct MlaDecode16Config {
  using Params = MlaDecodeParams;
  static_assert(!is_fp8(kCache));  // sm90/mla_decode_fp8_narrow
  static constexpr int kRank = kLatentRank;
  static constexpr Type kQ = kQuery;
  static constexpr Keys kKeys = kCache;
  static constexpr int kRows = kTileRows;
  static constexpr int kBlocks = 1;
  static constexpr bool kPairs = false;
  static constexpr bool kClusters = kJoinedBy == clusters;

  static constexpr int kWarpColumns = kRank / kConsumerWarps;  // columns of values of a warp
  static constexpr int kRopeTiles = kRopeDim / kTileColumns;
  static constexpr int kLatentTiles = kRank / kTileColumns;
  // A stage holds two column tiles of a key tile. As many stages as fit.
  static constexpr int kStageTiles = 2;
  static constexpr int kTileStages = kLatentTiles / kStageTiles;
  static constexpr int kStages = kClusters ? 9 : 11;
  static constexpr int kRopeSlots = 2;
  static constexpr bool kPrefetchesFirstKeys = true;
  static constexpr QueryLayout kQueries = {.register_tiles = 0,
                                           .shared_tiles = kLatentTiles + kRopeTiles,
                                           .box_tiles = kLatentTiles,
                                           .warps = 1,
                                           .stages = 0};
  static constexpr int kKeyWarps = kCache == pages ? 1 : 4;  // producer warps that load keys
  // A consumer holds 64 registers of q, 32 accumulators and 16 of scores.
  static constexpr int kProducerRegisters = 72;
  static constexpr int kConsumerRegisters = 208;

  // A row of a part: sums of weighted values as f16, in multiples of a power of two for each warp's
  // columns. The size puts neighbouring rows into different banks.
  struct alignas(16) PartRow {
    uint16_t values[kRank];
    float units[kConsumerWarps];
    float sums[kConsumerWarps];  // weights of each warp's keys, relative to 2^max
    float max;
    float unused[3];
  };
  static_assert(sizeof(PartRow) % 128 == 80);
  struct ClusterMemory {
    PartRow own[kRows];     // the block's part: rows that other blocks join
    PartRow joined[kRows];  // [members of the group, rows that this block joins]
    TransactionBarrier parts_full;
    bool last[kRows];  // the other clusters' parts of the row are stored
  };
  struct JoinMemory {
    OpenPart open[2];  // the first and the last item of a block may be parts
  };
  struct ScoreMemory {
    alignas(1024) uint16_t weights[kRows][kTileColumns];
    float given[2][4][32][4];  // scores over one half of the columns, for the other half's warps
    alignas(16) float maxima[kRows][kConsumerWarps];
    float sums[kRows][kConsumerWarps];
  };
  struct SharedMemory : ScoreMemory {
    alignas(1024) KeyTiles<kStageTiles> kv[kStages];
    alignas(1024) Select<(kRopeTiles > 0), KeyTiles<1>, Nothing> rope[kRopeSlots];
    alignas(1024) uint16_t q[kQueries.shared_tiles][kRows][kTileColumns];
    RowTile tiles[kTileSlots];
    Select<kClusters, ClusterMemory, Nothing> cluster;
    Select<!kClusters, JoinMemory, Nothing> join;
    ProducerState next;
    TransactionBarrier tile_full[kTileSlots], tile_empty[kTileSlots];
    TransactionBarrier full[kStages], empty[kStages];
    TransactionBarrier rope_full[kRopeSlots], rope_empty[kRopeSlots];
    TransactionBarrier q_full, q_empty;
  };

  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {3 * kWarpgroupThreads, sizeof(SharedMemory), kRows,
                                           kTileKeys};
  static_assert(sizeof(SharedMemory) <= kMaxSharedBytes);
  __device__ static void run(const Params& params);
};

// Named barriers.
enum NamedBarrier : int { all_consumers = 1 };

__device__ __forceinline__ void sync_consumers() {
  named_barrier_wait(all_consumers, kConsumerThreads);
}
__device__ __forceinline__ int consumer_thread() {
  return static_cast<int>(threadIdx.x) - kWarpgroupThreads;
}
__device__ __forceinline__ int consumer_warp() { return static_cast<int>(threadIdx.x) / 32 - 4; }
// Row r (0 or 1) of a thread.
__device__ __forceinline__ int row_of(int r) { return threadIdx.x % 32 / 4 + 8 * r; }

}  // namespace fovea::kernels::cuda
