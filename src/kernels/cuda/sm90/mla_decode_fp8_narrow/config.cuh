// SPDX-License-Identifier: Apache-2.0
// Shared memory and registers of the Hopper MLA decode kernel for 16 or 32 rows a block over fp8
// caches.
#pragma once

#include "kernels/cuda/sm90/mla_common/fp8.cuh"
#include "kernels/cuda/sm90/mla_common/work.cuh"

namespace fovea::kernels::cuda {

template <int kLatentRank, int kRopeDim, Type kQuery, Keys kCache, int kRowTile>
struct MlaDecodeFp8NarrowConfig {
  using Params = MlaDecodeParams;
  static_assert(is_fp8(kCache));
  static constexpr int kRank = kLatentRank;
  static constexpr Type kQ = kQuery;
  static constexpr Keys kKeys = kCache;
  static constexpr int kRows = kRowTile;
  static constexpr int kBlocks = 1;
  static constexpr bool kPairs = false;
  static constexpr bool kScaled = kCache == fp8_rows;
  // Operand types of the products: RoPE columns of fp8_rows are bf16, as the queries are.
  static constexpr Type kMath = f16;
  static constexpr Type kRopeMath = kScaled ? kQuery : f16;

  using Row = Fp8Row<kRank, kRopeDim, kCache>;
  static constexpr int kLatentTiles = kRank / kTileColumns;
  static constexpr int kRopeTiles = kRopeDim / kTileColumns;
  // A stage holds one key tile. The number is even: each stage belongs to one warpgroup, so its
  // phases stay in step.
  static constexpr int kStages = 4;
  // As shared code counts them; no query tile goes through stages.
  static constexpr int kStageTiles = 1;
  static constexpr int kTileStages = 1;
  static constexpr QueryLayout kQueries = {.register_tiles = 0,
                                           .shared_tiles = kLatentTiles + kRopeTiles,
                                           .box_tiles = kLatentTiles,
                                           .warps = 1,
                                           .stages = 0};

  // Left operands in registers, of 64 columns each. With 16 rows there are registers to read fp8
  // values before the operands they become are free.
  static constexpr int kBuffers = kRows == 16 ? 3 : 1;
  static constexpr bool kReadsAhead = kRows == 16;
  // Values of a thread that the warpgroups exchange at a time.
  static constexpr int kExchanged = kRows == 16 ? 32 : 8;

  struct KeyRows {
    uint4 rows[kTileKeys][Row::kBytes / 16];
  };
  struct SharedMemory {
    alignas(1024) uint16_t q[kQueries.shared_tiles][kRows][kTileColumns];
    alignas(1024) uint16_t weights[2][kRows][kTileColumns];
    alignas(128) KeyRows kv[kStages];
    alignas(16) uint16_t scales[2][4][kTileKeys];
    float exchange[2][kExchanged][kWarpgroupThreads];
    float maxima[2][4][kRows];
    float sums[2][4][kRows];
    RowTile tiles[kTileSlots];
    TransactionBarrier tile_full[kTileSlots], tile_empty[kTileSlots];
    TransactionBarrier full[kStages], empty[kStages];
    TransactionBarrier q_full, q_empty;
  };

  // Together the 384 * 168 registers that the block starts with.
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {3 * kWarpgroupThreads, sizeof(SharedMemory), kRows,
                                           kTileKeys};
  static_assert(sizeof(SharedMemory) <= kMaxSharedBytes);
  __device__ static void run(const Params& params);
};

// Named barriers: of both consumer warpgroups, and of each.
enum NamedBarrier : int { both_warpgroups = 1, first_warpgroup = 2 };

__device__ __forceinline__ void sync_warpgroups() {
  named_barrier_wait(both_warpgroups, 2 * kWarpgroupThreads);
}
__device__ __forceinline__ void sync_warpgroup(int group) {
  named_barrier_wait(first_warpgroup + group, kWarpgroupThreads);
}

// A thread's scores[4 * j + i] is key thread_row(i / 2), query row 8 * j + lane % 4 * 2 + i % 2;
// out[t][4 * j + i] is that row's value column 64 * t + 16 * warp + lane / 4 * 2 + i / 2.
template <class C>
struct Sums {
  float out[C::kLatentTiles][C::kRows / 2];
  // The maximum that weights refer to, as a power of two, of query row column_of(i).
  float max[C::kRows / 4];
  float sum[C::kRows / 4];  // sums of the weights of this thread's keys
};

__device__ __forceinline__ int column_of(int i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }
// Index of query row column_of(i), key thread_row(half), among the scores.
__device__ __forceinline__ constexpr int score_of(int i, int half) {
  return i / 2 * 4 + half * 2 + i % 2;
}

}  // namespace fovea::kernels::cuda
