// SPDX-License-Identifier: Apache-2.0
// Blocks that share a segment, for batches with fewer segments than blocks: two or four blocks of a
// cluster take one. Each scores every second or fourth key tile and sends the scores to the first
// two, which multiply all weights with half of V's columns each. So no block reads more than half
// of the segment, and one block adds up each sum. If a cluster has all segments of a row tile, its
// first two blocks add them up, else the segments are added through global memory.
#pragma once

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/sm90/common/work_list.cuh"
#include "kernels/cuda/sm90/few_rows/epilogue.cuh"
#include "kernels/cuda/sm90/few_rows/sharing_copies.cuh"

namespace fovea::kernels::cuda {

// Run by all warps of a block.
template <class Config>
class SharingBlock : RowResults<Config> {
 public:
  using Base = RowResults<Config>;
  using typename Base::SharedMemory;
  __device__ SharingBlock(const PrefillParams& params, SharedMemory& shared)
      : Base(params, shared, first_column()),
        rank_(cluster_rank() % kSharing),
        first_rank_(cluster_rank() - rank_) {}

  // Computes the block's share of its row tile, if it has one. Returns false, having done nothing,
  // if other clusters have segments of the row tile too.
  __device__ bool run() {
    TileCut cut;
    const WorkTile work = work_at<Config>(params_, *params_.order, piece(), cut);
    if (work.request < 0) {
      // Even with no work, wait so that this kernel does not finish before the previous one.
      if (blockIdx.x == 0) wait_for_previous_kernel();
      return true;
    }
    if (kJoined > 1 && cut.count > 0 && cut.count != params_.order->tile_count) return false;
    CutSlot& slot = shared_.tiles[0];
    if (threadIdx.x == 0) {
      slot.work = work;
      slot.cut = cut;
    }
    const bool computes = __shfl_sync(~0u, warp_, 0) < Config::kWarps;
    SegmentWalk<Config> segment(work);
    SharingCopier<Config> copier(params_, shared_, work, rank_);
    if (computes) {
      find_rows(work);
      clear_other_rows(work);
    } else {
      copier.begin(segment);
    }
    wait_for_previous_kernel();
    if (computes) read_queries(work);
    allow_next_kernel();
    float4 sum = {};
    RowSums sums[2] = {};
    for (bool later = false;; later = true) {
      if (computes) {
        attend(slot, work, segment, later, sum, sums);
      } else {
        copier.copy(segment, phases_, later);
        if (is_last(segment)) arrive_at_end();
      }
      phases_.pass(segment.count(), Layout::own_tiles(rank_, segment.count()));
      segment.advance();
      if (segment.done()) break;
      __syncwarp();
      cluster_arrive();  // all blocks have read the scores they were sent
      cluster_wait();
      if (!computes) copier.find(segment);
    }
    if (computes && multiplies()) {
      if (!is_cut(slot)) {
        store(work, sum, sums);
      } else if constexpr (kJoined > 1) {
        if (first_rank_ == 0) join_parts(slot);
      } else {
        join_cut(slot, Config::kMultiplying);
      }
    }
    cluster_wait();  // all that was sent has arrived
    return true;
  }

 private:
  using Base::end_segment, Base::store, Base::join_cut;
  using Base::lane_, Base::params_, Base::row_of, Base::rows, Base::shared_, Base::warp_;
  using Base::put_weights, Base::weigh_raised, Base::rescale, Base::sum_row;
  using Base::read_queries, Base::find_rows, Base::multiply_keys, Base::keep_scores,
      Base::read_kept;
  using Layout = SharingLayout<Config>;
  using Values = typename Layout::Values;
  static constexpr int kSharing = Config::kSharing, kJoined = Config::kJoined,
                       kOwnTiles = Layout::kOwnTiles;
  static constexpr int kColumnWarps = Layout::kColumns / 16;

  // Returns the number of the block's item in the list. A cluster has one item, or all items of a
  // head block, which lie a section's heads apart.
  __device__ int piece() const {
    if constexpr (kJoined == 1) return static_cast<int>(blockIdx.x) / kSharing;
    const PrefillOrder& order = *params_.order;
    const int head_blocks = params_.attention.batch.q_heads >> params_.heads_shift;
    const int head = static_cast<int>(blockIdx.x) / (kSharing * kJoined);
    const int number = first_rank_ / kSharing;
    if (head >= head_blocks || number >= order.tile_count) return order.tile_count * head_blocks;
    const int first_head = head / order.section_heads * order.section_heads;
    const int heads = min(order.section_heads, head_blocks - first_head);
    return order.tile_count * first_head + number * heads + head - first_head;
  }
  __device__ bool multiplies() const { return rank_ < Config::kMultiplying; }

  __device__ static bool is_last(const SegmentWalk<Config>& segment) {
    return segment.first == segment.begin;
  }
  // Called when the warp has received all that other blocks send.
  __device__ static void arrive_at_end() {
    __syncwarp();
    cluster_arrive_relaxed();
  }

  __device__ static int first_column() {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    return warp < kColumnWarps ? cluster_rank() % kSharing * Layout::kColumns + warp * 16
                               : Config::kHeadDimV;
  }

  // Zeroes the scores of rows that the tile does not have: no block sends them.
  __device__ void clear_other_rows(const WorkTile& work) const {
    for (int row = rows(work); row < Config::kRows; ++row) {
      for (int at = threadIdx.x; at < Config::kSegmentBlocks * Config::kKeys;
           at += Config::kComputing) {
        shared_.scores[at / Config::kKeys][row * Config::kRowPitch + at % Config::kKeys] = 0;
      }
    }
  }

  __device__ void attend(const CutSlot& slot, const WorkTile& work,
                         const SegmentWalk<Config>& segment, bool later, float4& sum,
                         RowSums (&sums)[2]) {
    const float factor = params_.attention.scale * kLog2E;
    const int count = segment.count();
    float scores[kOwnTiles][4];
    share_scores(work, segment, scores);
    if (multiplies()) shared_.sharing.scores.wait(phases_.scores);
    if (is_last(segment)) arrive_at_end();
    if (!multiplies()) return;
    float base[2];
    find_base(factor, base);
    bool grown = weigh(rank_, count, scores, factor, base);
#pragma unroll
    for (int other = 1; other < kSharing; ++other) {
      const int first = (rank_ + other) % kSharing;
#pragma unroll
      for (int n = 0; n < kOwnTiles; ++n)
        read_kept(min(first + n * kSharing, count - 1), scores[n]);
      grown = weigh(first, count, scores, factor, base) || grown;
    }
    fence_async_proxy();
    const bool raised = __any_sync(~0u, any_computing<Config>(grown));
    if (raised) weigh_raised(count, factor);
    float out[4] = {};
    if (__shfl_sync(~0u, warp_, 0) < kColumnWarps) {
      if (raised) {
        add_values(work, segment, raised, out);
      } else {
        multiply_values(work, segment, out);
      }
    } else {
      for (int row = warp_ - kColumnWarps; row < rows(work); row += Config::kWarps - kColumnWarps) {
        sum_row(row, count, factor);
      }
    }
    meet_computing<Config>();  // sums are complete
    if constexpr (kJoined > 1) {
      if (is_cut(slot))
        return send_part(segment.last / Config::kSegmentBlocks - slot.cut.first, out);
    }
    end_segment(slot, segment, out, later, sum, sums);
  }

  // Sends a segment's results to the one of the cluster's first blocks that has the same columns.
  __device__ void send_part(int number, const float (&out)[4]) {
    auto& join = shared_.join;
    if (threadIdx.x < Config::kRows) {
      const RowSums own = shared_.sums[threadIdx.x];
      store_in_cluster(&join.sums[number][threadIdx.x].base, rank_, float2{own.base, own.total},
                       join.full);
    }
    if (warp_ >= kColumnWarps) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* to = &join.values[number][warp_ * 16 + lane_ / 4 + half * 8][row_of(0)];
      store_in_cluster(to, rank_, float2{out[2 * half], out[2 * half + 1]}, join.full);
    }
  }

  // Adds up all segments of a cut tile, as join_cut() does, from what the blocks have sent.
  __device__ void join_parts(const CutSlot& slot) {
    auto& join = shared_.join;
    if (threadIdx.x == 0) join.full.arrive_expecting(slot.cut.count * join.kSegmentBytes);
    join.full.wait(0);
    if (warp_ >= kColumnWarps) return;
    RowSums sums[2] = {{kNothing, 0}, {kNothing, 0}};
    float4 values = {};
#pragma unroll
    for (int i = kJoined - 1; i >= 0; --i) {
      if (i >= slot.cut.count) continue;
      const auto& own = join.values[i];
      const int column = warp_ * 16 + lane_ / 4;
      const Join low = join_rows(sums[0], join.sums[i][row_of(0)]);
      const Join high = join_rows(sums[1], join.sums[i][row_of(1)]);
      values = {join_values(low, values.x, own[column][row_of(0)]),
                join_values(high, values.y, own[column][row_of(1)]),
                join_values(low, values.z, own[column + 8][row_of(0)]),
                join_values(high, values.w, own[column + 8][row_of(1)])};
    }
    store(slot.work, values, sums);
  }

  // Stores the weights of every kSharing-th key tile of the segment from `first` on; returns as
  // put_weights().
  __device__ bool weigh(int first, int count, const float (&scores)[kOwnTiles][4], float factor,
                        const float (&base)[2]) {
    bool grown = false;
#pragma unroll
    for (int n = 0; n < kOwnTiles; ++n) {
      const int i = first + n * kSharing;
      if (i < count) grown = put_weights(i, scores[n], factor, base) || grown;
    }
    return grown;
  }

  // Scores the block's key tiles and sends the scores to the multiplying blocks.
  __device__ void share_scores(const WorkTile& work, const SegmentWalk<Config>& segment,
                               float (&scores)[kOwnTiles][4]) {
    const int count = segment.count();
    const int bytes = rows(work) * Config::kRowPitch * static_cast<int>(sizeof(float));
    TransactionBarrier& full = shared_.sharing.scores;
    const int own = Layout::own_tiles(rank_, count);
    if (threadIdx.x == 0 && multiplies()) full.arrive_expecting((count - own) * bytes);
    for (int stage = 0; stage < own; ++stage) shared_.sharing.keys[stage].wait(phases_.keys(stage));
      // Each sum waits for its own last product only. Scores of stages without keys are not used.
#pragma unroll
    for (int stage = 0; stage < kOwnTiles; ++stage)
      multiply_keys(shared_.stages[stage], scores[stage]);
    __syncwarp();
    if (lane_ < own) shared_.sharing.keys_read[lane_].arrive();
#pragma unroll
    for (int stage = 0; stage < kOwnTiles; ++stage) {
      const int i = rank_ + stage * kSharing;
      if (stage < own) keep_scores(segment.last - i, i, scores[stage]);
    }
    fence_async_proxy();
    meet_computing<Config>();
    if (warp_ == 0 && lane_ < own) {
#pragma unroll
      for (int to = 0; to < Config::kMultiplying; ++to) {
        if (to != rank_)
          copy_in_cluster(shared_.scores[rank_ + lane_ * kSharing], first_rank_ + to, bytes, full);
      }
    }
  }

  // Finds the bases of the thread's rows: the largest score of the segment's last key tile. They
  // hold for all key tiles of the segment unless weigh_raised() raises them. Each warp finds the
  // base of one row (chosen on H200, 2026-11-23).
  __device__ void find_base(float factor, float (&base)[2]) {
    const float4 four =
        *reinterpret_cast<const float4*>(&shared_.scores[0][warp_ * Config::kRowPitch + 4 * lane_]);
    float max_score = fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w));
#pragma unroll
    for (int step = 1; step <= 16; step *= 2)
      max_score = fmaxf(max_score, __shfl_xor_sync(~0u, max_score, step));
    if (lane_ < Config::kSegmentBlocks)
      shared_.base[lane_][warp_] = fmaxf(kNothing, max_score * factor);
    meet_computing<Config>();
    base[0] = shared_.base[0][row_of(0)];
    base[1] = shared_.base[0][row_of(1)];
  }

  // Returns the address of eight columns of the values of a key.
  __device__ static void* value_place(Values& values, int key, int column) {
    return &values[key][(column / 8 ^ key % 8) * 8];
  }

  // Zeroes the warp's columns of V for keys that the request does not own: weight 0 times the bits
  // there may be NaN.
  __device__ void clear_unowned(const WorkTile& work, int block, Values& values) {
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
      Values& columns = Layout::values(shared_, i);
      shared_.sharing.values[i].wait(phases_.values(i));
      if (work.key_begin > block * Config::kKeys || work.kv_len < (block + 1) * Config::kKeys) {
        clear_unowned(work, block, columns);
      }
      if (raised && i > 0) {
#pragma unroll
        for (int x = 0; x < 4; ++x) out[x] *= rescale(i, row_of(x % 2));
      }
#pragma unroll
      for (int step = 0; step < Config::kKeys / 16; ++step) {
        const auto& weights = shared_.weights[i][step];
        uint32_t v[4];
        load_matrices_transposed(v, value_place(columns, step * 16 + lane_ % 8 + lane_ / 16 * 8,
                                                warp_ * 16 + lane_ / 8 % 2 * 8));
        multiply_add<Config::kQ>(out, v, weights[0][lane_], weights[1][lane_]);
      }
    }
  }

  // Adds the same products in the same order as add_values(), by those of the warpgroup that has
  // the block's columns.
  __device__ void multiply_values(const WorkTile& work, const SegmentWalk<Config>& segment,
                                  float (&out)[4]) {
    const int count = segment.count();
    if (__any_sync(~0u, work.key_begin > segment.first * Config::kKeys ||
                            work.kv_len < (segment.last + 1) * Config::kKeys)) {
#pragma unroll 1
      for (int i = 0; i < count; i += max(count - 1, 1)) {
        shared_.sharing.values[i].wait(phases_.values(i));
        clear_unowned(work, segment.last - i, Layout::values(shared_, i));
      }
      named_barrier_wait(kValuesBarrier, kWarpgroupThreads);
    }
#pragma unroll 1
    for (int i = 0; __any_sync(~0u, i < count); ++i) {
      const uint64_t values = columns_descriptor(shared_address(&Layout::values(shared_, i)), 0);
      const uint64_t weights = weights_descriptor(shared_address(&shared_.weights[i]));
      shared_.sharing.values[i].wait(phases_.values(i));
      products_begin();
#pragma unroll
      for (int step = 0; step < Config::kKeys / 16; ++step) {
        Product<8>::template run<Config::kQ, false, true>(
            out, moved(values, step * 16 * kSwizzledColumns * 2), weights + step * 16, true);
      }
    }
    products_commit();
    products_wait<0>();
    products_landed(out);
  }

  // Returns the descriptor of weights: neighbouring blocks of [8 rows][8 keys], not swizzled.
  __device__ static uint64_t weights_descriptor(uint32_t address) {
    constexpr uint32_t kBlock = Config::kRows * 16;
    return uint64_t{2 * kBlock >> 4} << 32 | (kBlock >> 4 << 16 | (address & 0x3ffff) >> 4);
  }

  const int rank_;        // among the blocks that share a segment
  const int first_rank_;  // rank in the cluster of the first of them
  SharingPhases<Config> phases_;
};

}  // namespace fovea::kernels::cuda
