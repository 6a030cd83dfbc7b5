// SPDX-License-Identifier: Apache-2.0
// Requests of up to eight rows: shared memory, and the warps that take work and copy keys.
#pragma once

#include "kernels/cuda/sm90/prefill/load.cuh"
#include "kernels/cuda/sm90/prefill/segment_joins.cuh"

namespace fovea::kernels::cuda {

// Of a segment that blocks of a cluster share.
template <int kTiles, int kOwnTiles>
struct ShareMemory {
  TransactionBarrier keys[kOwnTiles], keys_read[kOwnTiles], values[kTiles], scores;
};

// Of a row tile whose segments are those of a cluster.
template <int kSegments, int kColumns, int kRows>
struct JoinMemory {
  alignas(16) float values[kSegments][kColumns][kRows];
  RowSums sums[kSegments][kRows];
  TransactionBarrier full;
  static constexpr int kBytes = sizeof(values[0]) + sizeof(sums[0]);  // of a segment
};

// kBlocksOfShare: that may share a segment. kSegmentsOfCluster: whose blocks may be those of a
// cluster.
template <int kDim, Type kQuery, int kBlocksOfShare, int kSegmentsOfCluster>
struct EightRowsConfig {
  static_assert(kDim % kSwizzledColumns == 0 && kDim <= 128 && type_bytes(kQuery) == 2);
  using Params = PrefillParams;
  static constexpr int kHeadDim = kDim;
  static constexpr int kHeadDimV = kDim;
  static constexpr Type kQ = kQuery;
  static constexpr int kShare = kBlocksOfShare;
  static constexpr int kMultiplying =
      2;  // of these, with half of V's columns each; others only score
  static constexpr int kJoined = kSegmentsOfCluster;
  static constexpr int kRows = 8;
  static constexpr int kWarps = 8;  // that compute
  static constexpr int kComputing = 32 * kWarps;
  static constexpr int kCopiers = 2;  // warps
  static constexpr int kTaker = kWarps + kCopiers;
  // As prefill counts tiles, keys and segments.
  static constexpr bool kSegments = true, kPairs = false, kMasked = false;
  static constexpr int kBlocks = 1, kConsumers = 1;
  static constexpr int kKeys = 128;
  static_assert(kKeys == 16 * kWarps);
  static constexpr int kSegmentBlocks = kSegmentKeys / kKeys;
  static constexpr float kMostSum = 4096;
  static constexpr int kDimBlocks = kDim / kSwizzledColumns;
  // 160 KB on their way.
  static constexpr int kStages = kDim <= 64 ? 10 : 5;
  // So that neither every second row nor four key tiles side by side share a bank.
  static constexpr int kRowPitch = kKeys + 4;
  static constexpr int kTilePitch = kRows * kRowPitch + 8;

  struct SharedMemory {
    alignas(1024) uint16_t stages[kStages][kDimBlocks][kKeys][kSwizzledColumns];  // swizzled
    alignas(16) uint32_t weights[kSegmentBlocks][kWarps][2][32];  // of 16 keys: [half][row][8 keys]
    alignas(16) float scores[kSegmentBlocks]
                            [kTilePitch];  // raw, hidden ones -inf; key tiles from the last
    float most[kWarps][kRows];             // raw, of the first key tile
    float base[kSegmentBlocks][kRows];     // that a key tile's weights are relative to
    RowSums sums[kRows];
    int joins;
    CutSlot tiles[kTileSlots];
    TransactionBarrier full[kStages], empty[kStages];
    TransactionBarrier tile_full[kTileSlots], tile_empty[kTileSlots];
    Either<(kShare > 1), ShareMemory<kSegmentBlocks, kSegmentBlocks / kShare>, Nothing> share;
    Either<(kJoined > 1), JoinMemory<kJoined, kDim / kMultiplying, kRows>, Nothing> join;
  };
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {32 * (kTaker + 1), sizeof(SharedMemory), kGroupRows,
                                           kKeys};
  static_assert(sizeof(SharedMemory) <= 232448);
  __device__ static void run(const Params& params);
};

// The segments that a block takes of a row tile, from the last.
template <class Config>
struct SegmentWalk {
  int begin;        // key tiles of the row tile
  int last, first;  // of the segment
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

// Reads the list ahead of the copies. A warp.
template <class Config>
__device__ void take_row_tiles(const PrefillParams& params, typename Config::SharedMemory& shared) {
  const int lane = threadIdx.x % 32;
  PrefillOrder* order = params.order;
  Ring<kTileSlots> slots;
  int n = blockIdx.x;
  for (bool first = true;; first = false) {
    shared.tile_empty[slots.stage].wait(slots.phase ^ 1);
    TileCut cut;
    const WorkTile work = work_at<Config>(params, *order, n, cut);
    if (lane == 0) {
      shared.tiles[slots.stage].work = work;
      shared.tiles[slots.stage].cut = cut;
      shared.tile_full[slots.stage].arrive();
    }
    slots.advance();
    if (first) wait_for_previous_kernel();  // which has the same counters
    if (work.request < 0) break;
    n = __shfl_sync(~0u, lane == 0 ? atomicAdd(&order->taken, 1) : 0, 0) +
        static_cast<int>(gridDim.x);
  }
  // The last block to run out of work leaves the counters as it found them.
  if (lane == 0 && atomicAdd(&order->finished, 1) == static_cast<int>(gridDim.x) - 1) {
    order->taken = 0;
    order->finished = 0;
  }
}

// Copies every second key tile of the ring. A warp; one alone starts boxes of 16 keys too slowly.
template <class Config>
class EightRowsCopier {
 public:
  using SharedMemory = typename Config::SharedMemory;
  __device__ EightRowsCopier(const PrefillParams& params, SharedMemory& shared, int rank)
      : params_(params), shared_(shared), rank_(rank), segment_(wait_for_tile()) {
    block_ = segment_.last;
  }

  __device__ void run() {
    if (rank_ == 1) advance();
    BoxPlace place = find();
    wait_for_previous_kernel();
    while (!ended()) {
      // Page ids are read ahead, if that needs no wait for the next row tile.
      const bool ahead = has_two_more();
      const EightRowsCopier now = *this;
      BoxPlace next;
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        if ((i == 0) == ahead) {
          advance();
          advance();
          next = find();
        } else {
          now.copy(place);
        }
      }
      place = next;
    }
  }

 private:
  __device__ const WorkTile& wait_for_tile() {
    shared_.tile_full[slots_.stage].wait(slots_.phase);
    return work();
  }
  __device__ const WorkTile& work() const { return shared_.tiles[slots_.stage].work; }
  __device__ bool ended() const { return work().request < 0; }
  __device__ BoxPlace find() const {
    return ended() ? BoxPlace{} : box_place<Config>(params_, work(), block_, threadIdx.x % 32);
  }
  // Of its row tile.
  __device__ bool has_two_more() const {
    const int left = block_ - segment_.first + (values_ ? 0 : segment_.count());
    return left >= 2 || segment_.first > segment_.begin;
  }
  __device__ void copy(const BoxPlace& place) const {
    shared_.empty[at_.stage].wait(at_.phase ^ 1);
    // Others read the same keys only where a group has several row tiles.
    const BatchParams& batch = params_.attention.batch;
    const bool once = batch.q_heads == batch.kv_heads << params_.heads_shift;
    load_key_tile<Config>(params_, values_ ? params_.v : params_.k, work(), block_, place,
                          static_cast<int>(threadIdx.x) % 32, once ? kEvictFirst : kEvictNormal,
                          shared_.stages[at_.stage], shared_.full[at_.stage]);
  }
  __device__ void advance() {
    if (ended()) return;
    at_.advance();
    if (--block_ >= segment_.first) return;
    values_ = !values_;
    if (!values_) segment_.advance();
    if (segment_.done()) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) shared_.tile_empty[slots_.stage].arrive();
      slots_.advance();
      segment_ = SegmentWalk<Config>(wait_for_tile());
    }
    block_ = segment_.last;
  }

  const PrefillParams& params_;
  SharedMemory& shared_;
  const int rank_;
  Ring<kTileSlots> slots_;
  Ring<Config::kStages> at_;
  SegmentWalk<Config> segment_;
  int block_;
  bool values_ = false;
};

}  // namespace fovea::kernels::cuda
