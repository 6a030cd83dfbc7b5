// SPDX-License-Identifier: Apache-2.0
// Where keys are summed in segments: requests of up to eight rows, with the bits that prefill gives
// them. Keys and columns of V are the rows of both products, as in sm90/decode; single products of
// a warp sum as a warpgroup's do.
//
//   warp w, all key tiles of a segment   S^T[16 keys, 8 rows] = K Q^T, then weights to shared
//   memory all warps meet warp w                               the sum of row w's weights, in the
//   order of prefill warp w, the same key tiles           O^T[16 columns, 8 rows] += V^T P^T
//
// A ring holds the key tiles of K and then of V, segment by segment.
#pragma once

#include "kernels/cuda/sm90/prefill/eight_rows_shared.cuh"

namespace fovea::kernels::cuda {

// The warps that compute.
template <class Config>
class EightRows : EightRowsOut<Config> {
 public:
  using Base = EightRowsOut<Config>;
  using typename Base::SharedMemory;
  __device__ EightRows(const PrefillParams& params, SharedMemory& shared)
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
        computing_meet<Config>();  // sums are there
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

  // Raw scores of the warp's 16 keys of a key tile, the i-th of its segment from the last.
  __device__ void score(int block, int i, float (&scores)[4]) {
    shared_.full[at_.stage].wait(at_.phase);
    multiply_keys(shared_.stages[at_.stage], scores);
    release(at_.stage);
    at_.advance();
    keep_scores(block, i, scores);
  }

  // Weights of a segment. Whether the base of any row rises within it.
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

  // That of the thread's rows: the largest score of the segment's last key tile. For all its key
  // tiles, for the time being.
  __device__ void find_base(float factor, const float (&scores)[4], float (&base)[2]) {
    float most[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      most[i] = fmaxf(scores[i], scores[2 + i]);
#pragma unroll
      for (int step = 4; step <= 16; step *= 2)
        most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], step));
    }
    if (lane_ < 4) *reinterpret_cast<float2*>(&shared_.most[warp_][lane_ * 2]) = {most[0], most[1]};
    computing_meet<Config>();
#pragma unroll
    for (int warp = 0; warp < Config::kWarps; ++warp) {
      const float2 other = *reinterpret_cast<const float2*>(&shared_.most[warp][lane_ % 4 * 2]);
      most[0] = fmaxf(most[0], other.x);
      most[1] = fmaxf(most[1], other.y);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) base[i] = fmaxf(kNothing, most[i] * factor);
    if (lane_ < 4 && warp_ < Config::kSegmentBlocks) {
      *reinterpret_cast<float2*>(&shared_.base[warp_][lane_ * 2]) = {base[0], base[1]};
    }
  }

  // Makes the warp's columns of V zero where keys are not the request's: weight 0 times what lies
  // there may be NaN.
  __device__ void clear_strangers(const WorkTile& work, int block,
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
          clear_strangers(work, block, columns);
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

template <int kDim, Type kQuery, int kBlocksOfShare, int kSegmentsOfCluster>
__device__ void EightRowsConfig<kDim, kQuery, kBlocksOfShare, kSegmentsOfCluster>::run(
    const PrefillParams& params) {
  using Config = EightRowsConfig;
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(kWarps);
    }
    for (int i = 0; i < kTileSlots; ++i) {
      shared.tile_full[i].init(1);
      shared.tile_empty[i].init(kWarps + kCopiers);
    }
    if constexpr (kShare > 1) {
      for (TransactionBarrier& full : shared.share.keys) full.init(1);
      for (TransactionBarrier& read : shared.share.keys_read) read.init(kWarps);
      for (TransactionBarrier& full : shared.share.values) full.init(1);
      shared.share.scores.init(1);
    }
    if constexpr (kJoined > 1) shared.join.full.init(1);
    fence_barrier_init();
  }
  __syncthreads();
  if constexpr (kShare > 1) cluster_arrive_relaxed();
  // As in sm90/decode: the list and the page table are complete in the L2 once a layer has waited
  // for them.
  if (!params.list_settled) wait_for_previous_kernel();
  if constexpr (kShare > 1) {
    const int head_blocks = params.attention.batch.q_heads >> params.heads_shift;
    const int pieces = params.order->tile_count;
    const bool shares = kJoined > 1 ? params.attention.batch.requests == 1 && pieces <= kJoined
                                    : pieces * head_blocks <= static_cast<int>(gridDim.x) / kShare;
    cluster_wait();  // the barriers of all blocks are there
    if (shares && SharedRows<Config>(params, shared).run()) return;
  }
  const int warp = threadIdx.x / 32;
  if (warp < kWarps) {
    EightRows<Config>(params, shared).run();
  } else if (warp < kTaker) {
    EightRowsCopier<Config>(params, shared, warp - kWarps).run();
  } else {
    take_row_tiles<Config>(params, shared);
  }
}

}  // namespace fovea::kernels::cuda
