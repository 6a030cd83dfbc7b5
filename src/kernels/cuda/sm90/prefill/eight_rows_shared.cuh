// SPDX-License-Identifier: Apache-2.0
// Requests of up to eight rows where blocks outnumber segments: two blocks of a cluster share one. Each scores every
// second key tile and brings the scores to the other, then multiplies all weights with half of V's columns: so each
// reads half of the segment, and every sum is that of one block.
#pragma once

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/sm90/prefill/eight_rows_out.cuh"

namespace fovea::kernels::cuda {

// All warps of a block.
template <class Config>
class SharedRows : EightRowsOut<Config> {
 public:
  using Base = EightRowsOut<Config>;
  using typename Base::SharedMemory;
  __device__ SharedRows(const PrefillParams& params, SharedMemory& shared)
      : Base(params, shared, first_column()), rank_(cluster_rank()) {}

  // The cluster's row tile, if there is one.
  __device__ void run() {
    TileCut cut;
    const WorkTile work = work_at<Config>(params_, *params_.order, static_cast<int>(blockIdx.x) / kShare, cut);
    if (work.request < 0) return;
    CutSlot& slot = shared_.tiles[0];
    if (threadIdx.x == 0) {
      slot.work = work;
      slot.cut = cut;
    }
    const bool computes = warp_ < Config::kWarps;
    SegmentWalk<Config> segment(work);
    BoxPlace places[kCopies];
    find(work, segment, places);
    wait_for_previous_kernel();
    if (computes) {
      read_queries(work);
      find_rows(work);
      clear_other_rows(work);
    }
    allow_next_kernel();
    float4 sum = {};
    RowSums sums[2] = {};
    for (bool later = false;; later = true) {
      if (computes) {
        attend(slot, work, segment, later, sum, sums);
      } else {
        copy(work, segment, places);
      }
      pass_phases(segment.count());
      segment.advance();
      if (segment.done()) break;
      __syncwarp();
      cluster_arrive();  // all have read what they were sent
      cluster_wait();
      find(work, segment, places);
    }
    if (computes) {
      if (is_cut(slot)) {
        join_cut(slot, kShare);
      } else {
        store(work, sum, sums);
      }
    }
    __syncwarp();
    cluster_arrive_relaxed();  // what was sent has landed
    cluster_wait();
  }

 private:
  using Base::lane_, Base::params_, Base::row_of, Base::rows, Base::shared_, Base::warp_;
  using Base::read_queries, Base::find_rows, Base::multiply_keys, Base::keep_scores, Base::weigh_kept;
  using Base::weigh_raised, Base::rescale, Base::sum_row, Base::end_segment, Base::store, Base::join_cut;
  static constexpr int kShare = Config::kShare, kTiles = Config::kSegmentBlocks;
  static constexpr int kOwnTiles = kTiles / kShare;  // of K
  static constexpr int kColumns = Config::kHeadDimV / kShare;
  static constexpr int kColumnWarps = kColumns / 16;
  static_assert(kShare == 2 && kColumns == kSwizzledColumns && Config::kCopiers == 2);
  static constexpr int kCopies = kOwnTiles / 2 + kTiles / 2;  // of a warp: every second own tile of K, then of V
  using Values = uint16_t[Config::kKeys][kSwizzledColumns];   // of a key tile, swizzled

  __device__ static int first_column() {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    return warp < kColumnWarps ? cluster_rank() * kColumns + warp * 16 : Config::kHeadDimV;
  }

  // The block's key tiles of K are in the first stages, those of V behind them and then, as these are read, in their
  // place.
  __device__ Values& values(int i) const {
    const int place = (2 * kOwnTiles + i) % (2 * Config::kStages);
    return shared_.stages[place / 2][place % 2];
  }
  __device__ TransactionBarrier& keys_read(int stage) const { return shared_.share.keys_read[stage]; }
  __device__ uint32_t keys_phase(int stage) const { return phases_ >> (kTiles + stage) & 1; }
  __device__ int own_tiles(int count) const { return (count - rank_ + kShare - 1) / kShare; }

  // The key tile, counted from the segment's last, of a copying warp's n-th copy.
  __device__ int copied(int n) const {
    const int copier = warp_ - Config::kWarps;
    const int own = 2 * n + copier;
    return n < kOwnTiles / 2 ? rank_ + own * kShare : own - kOwnTiles;
  }
  __device__ bool copies() const { return warp_ >= Config::kWarps && warp_ < Config::kTaker; }
  __device__ void find(const WorkTile& work, const SegmentWalk<Config>& segment, BoxPlace (&places)[kCopies]) const {
    if (!copies()) return;
#pragma unroll
    for (int n = 0; n < kCopies; ++n) {
      const int i = copied(n);
      places[n] = i < segment.count() ? box_place<Config>(params_, work, segment.last - i, lane_) : BoxPlace{};
    }
  }
  __device__ void copy(const WorkTile& work, const SegmentWalk<Config>& segment,
                       const BoxPlace (&places)[kCopies]) const {
    if (!copies()) return;
#pragma unroll
    for (int n = 0; n < kCopies; ++n) {
      const int i = copied(n);
      if (i >= segment.count()) continue;
      const int block = segment.last - i;
      if (n < kOwnTiles / 2) {
        const int stage = i / kShare;
        load_key_tile<Config>(params_, params_.k, work, block, places[n], lane_, kEvictNormal, shared_.stages[stage],
                              shared_.share.keys[stage]);
      } else {
        const int stage = (i + 2 * kOwnTiles) % (2 * Config::kStages) / 2;  // whose keys may have lain there
        if (stage < own_tiles(segment.count())) keys_read(stage).wait(keys_phase(stage));
        copy_values(work, block, i, places[n]);
      }
    }
  }
  __device__ void copy_values(const WorkTile& work, int block, int i, BoxPlace place) const {
    TransactionBarrier& full = shared_.share.values[i];
    if (lane_ == 0) full.arrive_expecting(sizeof(Values));
    __syncwarp();
#pragma unroll 1
    for (int box = lane_; box * params_.box_keys < Config::kKeys; box += 32) {
      load_box(&values(i)[box * params_.box_keys], params_.v, full, kEvictNormal, rank_ * kColumns, work.kv_head,
               place.place, place.page);
    }
  }

  // Of what a segment of so many key tiles has used.
  __device__ void pass_phases(int count) {
    scores_phase_ ^= 1;
    phases_ ^= ((1u << count) - 1) ^ (((1u << own_tiles(count)) - 1) << kTiles);
  }

  // Nobody sends scores of rows that the tile does not have.
  __device__ void clear_other_rows(const WorkTile& work) const {
    for (int row = rows(work); row < Config::kRows; ++row) {
      for (int at = threadIdx.x; at < Config::kSegmentBlocks * Config::kKeys; at += Config::kComputing) {
        shared_.scores[at / Config::kKeys][row * Config::kRowPitch + at % Config::kKeys] = 0;
      }
    }
  }

  __device__ void attend(const CutSlot& slot, const WorkTile& work, const SegmentWalk<Config>& segment, bool later,
                         float4& sum, RowSums (&sums)[2]) {
    const float factor = params_.attention.scale * kLog2E;
    const int count = segment.count();
    share_scores(work, segment);
    float base[2];
    find_base(factor, base);
    bool grown = false;
#pragma unroll 1
    for (int i = 0; i < count; ++i) grown = weigh_kept(i, factor, base) || grown;
    const bool raised = any_computing<Config>(grown);
    if (raised) weigh_raised(count, factor);
    float out[4] = {};
    if (warp_ < kColumnWarps) {
      add_values(work, segment, raised, out);
    } else {
      for (int row = warp_ - kColumnWarps; row < rows(work); row += Config::kWarps - kColumnWarps) {
        sum_row(row, count, factor);
      }
    }
    computing_meet<Config>();  // sums are there
    end_segment(slot, segment, out, later, sum, sums);
  }

  // Scores of the block's key tiles to the other one, and its to this one.
  __device__ void share_scores(const WorkTile& work, const SegmentWalk<Config>& segment) {
    const int count = segment.count();
    const int bytes = rows(work) * Config::kRowPitch * static_cast<int>(sizeof(float));
    TransactionBarrier& full = shared_.share.scores;
    const int own = own_tiles(count);
    if (threadIdx.x == 0) full.arrive_expecting((count - own) * bytes);
    for (int stage = 0; stage < own; ++stage) {
      const int i = rank_ + stage * kShare;
      float scores[4];
      shared_.share.keys[stage].wait(keys_phase(stage));
      multiply_keys(shared_.stages[stage], scores);
      __syncwarp();
      if (lane_ == 0) keys_read(stage).arrive();
      keep_scores(segment.last - i, i, scores);
    }
    fence_async_proxy();
    computing_meet<Config>();
    if (warp_ == 0 && lane_ < own) {
      copy_in_cluster(shared_.scores[rank_ + lane_ * kShare], 1 - rank_, bytes, full);
    }
    full.wait(scores_phase_);
  }

  // That of the thread's rows: the largest score of the segment's last key tile. For all its key tiles, for the time
  // being.
  __device__ void find_base(float factor, float (&base)[2]) const {
    float most[2] = {-infinity(), -infinity()};
#pragma unroll
    for (int key = 0; key < Config::kKeys; key += 8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        most[i] = fmaxf(most[i], shared_.scores[0][row_of(i) * Config::kRowPitch + key + lane_ / 4]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int step = 4; step <= 16; step *= 2) most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], step));
      base[i] = fmaxf(kNothing, most[i] * factor);
    }
    if (lane_ < 4 && warp_ < Config::kSegmentBlocks) {
      *reinterpret_cast<float2*>(&shared_.base[warp_][lane_ * 2]) = {base[0], base[1]};
    }
  }

  // Eight columns of the values of a key.
  __device__ static void* value_place(Values& values, int key, int column) {
    return &values[key][(column / 8 ^ key % 8) * 8];
  }

  // Makes the warp's columns of V zero where keys are not the request's: weight 0 times what lies there may be NaN.
  __device__ void clear_strangers(const WorkTile& work, int block, Values& values) {
    const int begin = work.key_begin - block * Config::kKeys;
    const int end = work.kv_len - block * Config::kKeys;
    for (int i = lane_; i < 2 * Config::kKeys; i += 32) {
      const int key = i / 2;
      if (key >= begin && key < end) continue;
      *static_cast<uint4*>(value_place(values, key, warp_ * 16 + i % 2 * 8)) = {};
    }
    fence_async_proxy();
    __syncwarp();
  }

  __device__ void add_values(const WorkTile& work, const SegmentWalk<Config>& segment, bool raised,
                             float (&out)[4]) {
#pragma unroll 1
    for (int i = 0; i < segment.count(); ++i) {
      const int block = segment.last - i;
      Values& columns = values(i);
      shared_.share.values[i].wait(phases_ >> i & 1);
      if (work.key_begin > block * Config::kKeys || work.kv_len < (block + 1) * Config::kKeys) {
        clear_strangers(work, block, columns);
      }
      if (raised && i > 0) {
#pragma unroll
        for (int x = 0; x < 4; ++x) out[x] *= rescale(i, row_of(x % 2));
      }
#pragma unroll
      for (int step = 0; step < Config::kKeys / 16; ++step) {
        const uint2 weights = shared_.weights[i][step][lane_];
        uint32_t v[4];
        load_matrices_transposed(v, value_place(columns, step * 16 + lane_ % 8 + lane_ / 16 * 8,
                                                warp_ * 16 + lane_ / 8 % 2 * 8));
        multiply_add<Config::kQ>(out, v, weights.x, weights.y);
      }
    }
  }

  const int rank_;
  uint32_t scores_phase_ = 0;
  uint32_t phases_ = 0;  // of the barriers of values, then of keys
};

}  // namespace fovea::kernels::cuda
