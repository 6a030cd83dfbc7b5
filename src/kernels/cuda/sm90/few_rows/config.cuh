// SPDX-License-Identifier: Apache-2.0
// Tiles, stages and shared memory of the kernel for requests of up to eight rows.
#pragma once

#include "kernels/cuda/common/conditional.cuh"
#include "kernels/cuda/sm90/common/load_boxes.cuh"
#include "kernels/cuda/sm90/common/segment_sums.cuh"

namespace fovea::kernels::cuda {

enum NamedBarrier : int {
  kComputingBarrier = 1,  // all computing warps
  kValuesBarrier = 2,     // the warpgroup that multiplies values by warpgroup products
};

// Barriers of a segment that blocks of a cluster share.
template <int kTiles, int kOwnTiles>
struct SharingMemory {
  TransactionBarrier keys[kOwnTiles], keys_read[kOwnTiles], values[kTiles], scores;
};

// Results of the segments of a row tile, each of which some blocks of the cluster compute.
template <int kSegments, int kColumns, int kRows>
struct JoinMemory {
  alignas(16) float values[kSegments][kColumns][kRows];
  RowSums sums[kSegments][kRows];
  TransactionBarrier full;
  static constexpr int kSegmentBytes = sizeof(values[0]) + sizeof(sums[0]);
};

// kSharingBlocks: blocks of a cluster that share each segment. kJoinedSegments: segments of a row
// tile whose results the cluster adds up itself; 1: they are added through global memory.
template <int kDim, Type kQuery, int kSharingBlocks, int kJoinedSegments>
struct FewRowsConfig {
  static_assert(kDim % kSwizzledColumns == 0 && kDim <= 128 && type_bytes(kQuery) == 2);
  using Params = PrefillParams;
  static constexpr int kHeadDim = kDim;
  static constexpr int kHeadDimV = kDim;
  static constexpr Type kQ = kQuery;
  static constexpr int kSharing = kSharingBlocks;
  // The first sharing blocks multiply half of V's columns each; the others only find scores.
  static constexpr int kMultiplying = 2;
  static constexpr int kJoined = kJoinedSegments;
  static constexpr int kRows = 8;
  static constexpr int kWarps = 8;  // computing warps
  static constexpr int kComputing = 32 * kWarps;
  static constexpr int kCopiers = 2;  // copying warps
  static constexpr int kTaker = kWarps + kCopiers;
  // Read by work_at() and load_key_tile().
  static constexpr bool kSegments = true, kPairs = false, kMasked = false;
  static constexpr int kBlocks = 1, kConsumers = 1;
  static constexpr int kKeys = 128;
  static_assert(kKeys == 16 * kWarps);
  static constexpr int kSegmentBlocks = kSegmentKeys / kKeys;
  static constexpr float kMaxSum = 4096;
  static constexpr int kDimBlocks = kDim / kSwizzledColumns;
  // The stages hold 160 KB.
  static constexpr int kStages = kDim <= 64 ? 10 : 5;
  // Neither every second row nor four neighbouring key tiles share a bank.
  static constexpr int kRowPitch = kKeys + 4;
  static constexpr int kTilePitch = kRows * kRowPitch + 8;

  struct SharedMemory {
    alignas(1024) uint16_t stages[kStages][kDimBlocks][kKeys][kSwizzledColumns];
    alignas(16) uint32_t weights[kSegmentBlocks][kWarps][2][32];  // 16 keys: [half][row][8 keys]
    // Raw scores, hidden ones -inf. Key tiles count from the segment's last one.
    alignas(16) float scores[kSegmentBlocks][kTilePitch];
    float max[kWarps][kRows];           // largest raw scores of the first key tile
    float base[kSegmentBlocks][kRows];  // base of a key tile's weights
    RowSums sums[kRows];
    int joins;
    CutSlot tiles[kTileSlots];
    TransactionBarrier full[kStages], empty[kStages];
    TransactionBarrier tile_full[kTileSlots], tile_empty[kTileSlots];
    Conditional<(kSharing > 1), SharingMemory<kSegmentBlocks, kSegmentBlocks / kSharing>, Nothing>
        sharing;
    Conditional<(kJoined > 1), JoinMemory<kJoined, kDim / kMultiplying, kRows>, Nothing> join;
  };
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {32 * (kTaker + 1), sizeof(SharedMemory), kGroupRows,
                                           kKeys};
  static_assert(sizeof(SharedMemory) <= kMaxSharedBytes);
  __device__ static void run(const Params& params);
};

// Goes through the segments that a block takes of a row tile, from the last one.
template <class Config>
struct SegmentWalk {
  int begin;        // first key tile of the row tile
  int last, first;  // key tiles of the segment
  __device__ explicit SegmentWalk(const WorkTile& work) : begin(work.block_begin) {
    go_to(work.block_end - 1);
  }
  __device__ void go_to(int block) {
    last = block;
    first = max(begin, block / Config::kSegmentBlocks * Config::kSegmentBlocks);
  }
  __device__ bool done() const { return last < begin; }
  __device__ int count() const { return last - first + 1; }
  __device__ void advance() { go_to(first - 1); }
};

}  // namespace fovea::kernels::cuda
