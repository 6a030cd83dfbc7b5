// SPDX-License-Identifier: Apache-2.0
// The computing warps of a block that attends to whole segments.
#pragma once

#include "kernels/cuda/sm90/few_rows/epilogue.cuh"

namespace fovea::kernels::cuda {

// A computing warp.
template <class Config>
class Consumer : RowResults<Config> {
 public:
  using Base = RowResults<Config>;
  using typename Base::SharedMemory;
  __device__ Consumer(const PrefillParams& params, SharedMemory& shared)
      : Base(params, shared, threadIdx.x / 32 * 16) {}

  __device__ void run() {
    const float factor = params_.attention.scale * kLog2E;
    Ring<kTileSlots> slots;
    for (bool first = true;; first = false) {
      shared_.tile_full[slots.stage].wait(slots.phase);
      const CutSlot& slot = shared_.tiles[slots.stage];
      if (first) wait_for_previous_kernel();
      if (slot.work.request < 0) break;
      read_queries(slot.work);
      if (first) allow_next_kernel();
      find_rows(slot.work);
      float4 sum = {};
      RowSums sums[2] = {};
      bool later = false;
      for (SegmentWalk<Config> segment(slot.work); !segment.done(); segment.advance()) {
        const bool raised = weigh(segment, factor);
        if (warp_ < Config::kRows) sum_row(warp_, segment.count(), factor);
        float values[4] = {};
        add_values(slot.work, segment, raised, values);
        meet_computing<Config>();  // sums are complete
        end_segment(slot, segment, values, later, sum, sums);
        later = true;
      }
      if (is_cut(slot)) {
        join_cut(slot, 1);
      } else {
        store(slot.work, sum, sums);
      }
      __syncwarp();
      if (lane_ == 0) shared_.tile_empty[slots.stage].arrive();
      slots.advance();
    }
  }

 private:
  using Base::column_, Base::lane_, Base::params_, Base::row_of, Base::shared_, Base::warp_;
  using Base::read_queries, Base::find_rows, Base::multiply_keys, Base::keep_scores,
      Base::put_weights;
  using Base::weigh_raised, Base::rescale, Base::sum_row, Base::end_segment, Base::store,
      Base::join_cut;

  __device__ void release(int stage) {
    __syncwarp();
    if (lane_ == 0) shared_.empty[stage].arrive();
  }

  // Finds the raw scores of the warp's 16 keys of a key tile, the i-th of its segment from the
  // last.
  __device__ void score(int block, int i, float (&scores)[4]) {
    shared_.full[at_.stage].wait(at_.phase);
    multiply_keys(shared_.stages[at_.stage], scores);
    release(at_.stage);
    at_.advance();
    keep_scores(block, i, scores);
  }

  // Finds the weights of a segment; returns whether the base of any row rises within it.
  __device__ bool weigh(const SegmentWalk<Config>& segment, float factor) {
    const int count = segment.count();
    float base[2];
    float scores[4];
    bool grown = false;
    score(segment.last, 0, scores);
    find_base(factor, scores, base);
#pragma unroll 1
    for (int i = 0;; ++i) {
      grown = put_weights(i, scores, factor, base) || grown;
      if (i + 1 == count) break;
      score(segment.last - i - 1, i + 1, scores);
    }
    if (!any_computing<Config>(grown)) return false;
    weigh_raised(count, factor);
    return true;
  }

  // Finds the bases of the thread's rows: the largest score of the segment's last key tile. They
  // hold for all key tiles of the segment unless weigh_raised() raises them.
  __device__ void find_base(float factor, const float (&scores)[4], float (&base)[2]) {
    float max_score[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      max_score[i] = fmaxf(scores[i], scores[2 + i]);
#pragma unroll
      for (int step = 4; step <= 16; step *= 2)
        max_score[i] = fmaxf(max_score[i], __shfl_xor_sync(~0u, max_score[i], step));
    }
    if (lane_ < 4)
      *reinterpret_cast<float2*>(&shared_.max[warp_][lane_ * 2]) = {max_score[0], max_score[1]};
    meet_computing<Config>();
#pragma unroll
    for (int warp = 0; warp < Config::kWarps; ++warp) {
      const float2 other = *reinterpret_cast<const float2*>(&shared_.max[warp][lane_ % 4 * 2]);
      max_score[0] = fmaxf(max_score[0], other.x);
      max_score[1] = fmaxf(max_score[1], other.y);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) base[i] = fmaxf(kNothing, max_score[i] * factor);
    if (lane_ < 4 && warp_ < Config::kSegmentBlocks) {
      *reinterpret_cast<float2*>(&shared_.base[warp_][lane_ * 2]) = {base[0], base[1]};
    }
  }

  // Zeroes the warp's columns of V for keys that the request does not own: weight 0 times the bits
  // there may be NaN.
  __device__ void clear_unowned(const WorkTile& work, int block,
                                uint16_t (*columns)[kSwizzledColumns]) {
    const int begin = work.key_begin - block * Config::kKeys;
    const int end = work.kv_len - block * Config::kKeys;
    for (int i = lane_; i < 2 * Config::kKeys; i += 32) {
      const int key = i / 2;
      if (key >= begin && key < end) continue;
      *reinterpret_cast<uint4*>(&columns[key][((warp_ % 4 * 2 + i % 2) ^ key % 8) * 8]) = {};
    }
    fence_async_proxy();
    __syncwarp();
  }

  __device__ void add_values(const WorkTile& work, const SegmentWalk<Config>& segment, bool raised,
                             float (&values)[4]) {
    const bool idle = warp_ * 16 >= Config::kHeadDimV;
#pragma unroll 1
    for (int i = 0; i < segment.count(); ++i) {
      const int block = segment.last - i;
      shared_.full[at_.stage].wait(at_.phase);
      if (!idle) {
        auto& columns = shared_.stages[at_.stage][warp_ / 4];
        if (work.key_begin > block * Config::kKeys || work.kv_len < (block + 1) * Config::kKeys) {
          clear_unowned(work, block, columns);
        }
        if (raised && i > 0) {
#pragma unroll
          for (int x = 0; x < 4; ++x) values[x] *= rescale(i, row_of(x % 2));
        }
#pragma unroll
        for (int step = 0; step < Config::kKeys / 16; ++step) {
          const auto& weights = shared_.weights[i][step];
          const int key = step * 16 + lane_ % 8 + lane_ / 16 * 8;
          uint32_t v[4];
          load_matrices_transposed(v,
                                   &columns[key][((warp_ % 4 * 2 + lane_ / 8 % 2) ^ key % 8) * 8]);
          multiply_add<Config::kQ>(values, v, weights[0][lane_], weights[1][lane_]);
        }
      }
      release(at_.stage);
      at_.advance();
    }
  }

  Ring<Config::kStages> at_;
};

}  // namespace fovea::kernels::cuda
