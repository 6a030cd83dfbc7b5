// SPDX-License-Identifier: Apache-2.0
// Copies of blocks that share a segment: where its keys and values lie, and the warps that copy
// them.
#pragma once

#include "kernels/cuda/sm90/few_rows/config.cuh"

namespace fovea::kernels::cuda {

// The first stages hold the block's key tiles of K. The block's half of the columns of V follows
// them, then takes the places of K as K has been read.
template <class Config>
struct SharingLayout {
  static constexpr int kSharing = Config::kSharing, kTiles = Config::kSegmentBlocks;
  static constexpr int kOwnTiles = kTiles / kSharing;  // key tiles of K
  static constexpr int kColumns = Config::kHeadDimV / Config::kMultiplying;
  static_assert(kColumns == kSwizzledColumns && kOwnTiles % Config::kCopiers == 0 &&
                Config::kCopiers == 2);
  using Values = uint16_t[Config::kKeys][kSwizzledColumns];  // swizzled

  // Returns a half stage. Key tiles count from the segment's last one here and in values().
  __device__ static int place_of_values(int i) {
    return (2 * kOwnTiles + i) % (2 * Config::kStages);
  }
  __device__ static Values& values(typename Config::SharedMemory& shared, int i) {
    const int place = place_of_values(i);
    return shared.stages[place / 2][place % 2];
  }
  __device__ static int own_tiles(int rank, int count) {
    return (count - rank + kSharing - 1) / kSharing;
  }
};

// Phases of the barriers of a block.
template <class Config>
struct SharingPhases {
  uint32_t scores = 0;
  uint32_t bits = 0;  // values, then keys
  __device__ uint32_t values(int i) const { return bits >> i & 1; }
  __device__ uint32_t keys(int stage) const { return bits >> (Config::kSegmentBlocks + stage) & 1; }
  // Ends a segment of `count` key tiles, of which the block has scored `own`.
  __device__ void pass(int count, int own) {
    scores ^= 1;
    bits ^= ((1u << count) - 1) ^ (((1u << own) - 1) << Config::kSegmentBlocks);
  }
};

// Copies every second one of the block's key tiles of K, then of V. All warps may call it; only the
// copying warps do anything.
template <class Config>
class SharingCopier {
 public:
  using SharedMemory = typename Config::SharedMemory;
  __device__ SharingCopier(const PrefillParams& params, SharedMemory& shared, const WorkTile& work,
                           int rank)
      : params_(params),
        shared_(shared),
        work_(work),
        rank_(rank),
        copier_(static_cast<int>(threadIdx.x) / 32 - Config::kWarps),
        lane_(threadIdx.x % 32),
        boxes_shift_(31 - __clz(Config::kKeys / params.box_keys)) {}

  // Finds all boxes of a segment at once: a page id from the L2 takes as long as a copy.
  __device__ void find(const SegmentWalk<Config>& segment) {
    if (!copies()) return;
#pragma unroll
    for (int n = 0; n < kHeld; ++n) {
      const int box = n * 32 + lane_;
      const int block = segment.first + (box >> boxes_shift_);
      const bool live = block <= segment.last;
      places_[n] = live ? box_place<Config>(params_, work_, block, box & ((1 << boxes_shift_) - 1))
                        : BoxPlace{};
    }
  }

  // Called before the wait for the previous kernel: copies the keys of the first segment that were
  // written before this pass and whose place is free, and prefetches the others into the L2.
  __device__ void begin(const SegmentWalk<Config>& segment) {
    find(segment);
    if (!copies()) return;
#pragma unroll 1
    for (int n = 0; n < kCopies; ++n) {
      const Target to = target(n, segment);
      if (!has(to, segment)) continue;
      const BoxPlace from = place_of(segment, to);
      if (!to.reused) expect(to);
      if (!to.reused && is_written(segment, to)) {
        copy_box(to, from);
      } else {
        fetch(to, from);
      }
    }
  }
  // Copies the rest of the first segment, or all of a later one.
  __device__ void copy(const SegmentWalk<Config>& segment, const SharingPhases<Config>& phases,
                       bool later) const {
    if (!copies()) return;
#pragma unroll
    for (int n = 0; n < kCopies; ++n) {
      const Target to = target(n, segment);
      if (!has(to, segment)) continue;
      const BoxPlace from = place_of(segment, to);
      if (to.reused) shared_.sharing.keys_read[to.stage].wait(phases.keys(to.stage));
      if (to.reused || later) expect(to);
      if (to.reused || later || !is_written(segment, to)) copy_box(to, from);
    }
  }

 private:
  using Layout = SharingLayout<Config>;
  static constexpr int kOwnTiles = Layout::kOwnTiles;
  static constexpr int kCopies = kOwnTiles / 2 + Layout::kTiles / 2;
  // Maximum number of boxes of a segment that a lane has.
  static constexpr int kHeld = Layout::kTiles * Config::kKeys / 16 / 32;
  static_assert(Config::kKeys / 16 <= 32);  // each box of a key tile has a lane

  // Place of the n-th copy, that of key tile i counted from the segment's last one.
  struct Target {
    int i;
    bool of_keys;
    int stage;
    bool reused;  // K lies there until it has been read
  };
  __device__ Target target(int n, const SegmentWalk<Config>& segment) const {
    const int own = 2 * n + copier_;
    if (n < kOwnTiles / 2) return {rank_ + own * Config::kSharing, true, own, false};
    const int i = own - kOwnTiles;
    const int stage = Layout::place_of_values(i) / 2;
    return {i, false, stage, stage < Layout::own_tiles(rank_, segment.count())};
  }
  __device__ bool has(const Target& to, const SegmentWalk<Config>& segment) const {
    return to.i < segment.count() && (to.of_keys || rank_ < Config::kMultiplying);
  }
  // Returns the place of the lane's box, which any lane may have found.
  __device__ BoxPlace place_of(const SegmentWalk<Config>& segment, const Target& to) const {
    const int box = ((segment.last - to.i - segment.first) << boxes_shift_) + lane_;
    BoxPlace found;
#pragma unroll
    for (int n = 0; n < kHeld; ++n) {
      const BoxPlace from = {__shfl_sync(~0u, places_[n].page, box),
                             __shfl_sync(~0u, places_[n].place, box)};
      if (n == 0 || box >= n * 32) found = from;
    }
    return found;
  }
  __device__ bool copies() const { return copier_ >= 0 && copier_ < Config::kCopiers; }
  __device__ bool has_box() const { return lane_ * params_.box_keys < Config::kKeys; }
  // Returns whether all keys of the lane's box were written before this pass.
  __device__ bool is_written(const SegmentWalk<Config>& segment, const Target& to) const {
    const int end = (segment.last - to.i) * Config::kKeys + (lane_ + 1) * params_.box_keys;
    return params_.keys_written && end <= work_.kv_len - work_.q_len;
  }

  __device__ void expect(const Target& to) const {
    if (lane_ == 0) {
      if (to.of_keys) {
        shared_.sharing.keys[to.stage].arrive_expecting(sizeof(shared_.stages[0]));
      } else {
        shared_.sharing.values[to.i].arrive_expecting(sizeof(typename Layout::Values));
      }
    }
    __syncwarp();
  }
  __device__ void copy_box(const Target& to, const BoxPlace& from) const {
    if (!has_box()) return;
    const int row = lane_ * params_.box_keys;
    if (to.of_keys) {
#pragma unroll
      for (int c = 0; c < Config::kDimBlocks; ++c) {
        load_box(&shared_.stages[to.stage][c][row], params_.k, shared_.sharing.keys[to.stage],
                 kEvictNormal, c * kSwizzledColumns, work_.kv_head, from.place, from.page);
      }
    } else {
      load_box(&Layout::values(shared_, to.i)[row], params_.v, shared_.sharing.values[to.i],
               kEvictNormal, rank_ * Layout::kColumns, work_.kv_head, from.place, from.page);
    }
  }
  __device__ void fetch(const Target& to, const BoxPlace& from) const {
    if (!has_box() || from.page < 0) return;
    if (to.of_keys) {
#pragma unroll
      for (int c = 0; c < Config::kDimBlocks; ++c) {
        prefetch_box(params_.k, c * kSwizzledColumns, work_.kv_head, from.place, from.page);
      }
    } else {
      prefetch_box(params_.v, rank_ * Layout::kColumns, work_.kv_head, from.place, from.page);
    }
  }

  const PrefillParams& params_;
  SharedMemory& shared_;
  const WorkTile& work_;
  const int rank_, copier_, lane_;
  const int boxes_shift_;  // log2 of the boxes of a key tile
  BoxPlace places_[kHeld];
};

}  // namespace fovea::kernels::cuda
