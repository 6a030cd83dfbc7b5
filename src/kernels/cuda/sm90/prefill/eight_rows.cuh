// SPDX-License-Identifier: Apache-2.0
// Where keys are summed in segments: requests of up to eight rows, with the bits that prefill gives them. Keys and
// columns of V are the rows of both products, as in sm90/decode; single products of a warp sum as a warpgroup's do.
//
//   warp w, all key tiles of a segment   S^T[16 keys, 8 rows] = K Q^T, then weights to shared memory
//   all warps meet
//   warp w                               the sum of row w's weights, in the order of prefill
//   warp w, the same key tiles           O^T[16 columns, 8 rows] += V^T P^T
//
// A ring holds the key tiles of K and then of V, segment by segment.
#pragma once

#include "kernels/cuda/sm90/prefill/eight_rows_load.cuh"

namespace fovea::kernels::cuda {

// The barrier of the warps that compute, and whether any thread says so.
template <class Config>
__device__ __forceinline__ void computing_meet() {
  named_barrier_wait(1, Config::kComputing);
}
template <class Config>
__device__ __forceinline__ bool any_computing(bool value) {
  int any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.s32 p, %1, 0;\nbar.red.or.pred q, 1, %2, p;\nselp.s32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(static_cast<int>(value)), "n"(Config::kComputing)
      : "memory");
  return any != 0;
}

__device__ __forceinline__ uint32_t transposed_8x8(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// The warps that compute. Lane l has rows 2 (l % 4) and the next; of 16 keys or columns l / 4 and l / 4 + 8.
template <class Config>
class EightRows {
 public:
  using SharedMemory = typename Config::SharedMemory;
  __device__ EightRows(const PrefillParams& params, SharedMemory& shared)
      : params_(params), shared_(shared), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32) {}

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
        if (warp_ < Config::kRows) sum_row(segment.count(), factor);
        float values[4] = {};
        add_values(slot.work, segment, raised, values);
        computing_meet<Config>();  // sums are there
        end_segment(slot, segment, values, later, sum, sums);
        later = true;
      }
      if (is_cut(slot)) {
        join_cut(slot);
      } else {
        store(slot.work, sum, sums);
      }
      __syncwarp();
      if (lane_ == 0) shared_.tile_empty[slots.stage].arrive();
      slots.advance();
    }
  }

 private:
  static constexpr int kSteps = Config::kHeadDim / 16;

  __device__ int row_of(int i) const { return lane_ % 4 * 2 + i; }
  __device__ int rows(const WorkTile& work) const { return work.q_len << params_.heads_shift; }

  // As right operands: lane l has row l / 4.
  __device__ void read_queries(const WorkTile& work) {
    const AttentionParams& attention = params_.attention;
    const int row = lane_ / 4;
    const bool valid = row < rows(work);
    const auto* q = static_cast<const uint16_t*>(attention.q);
    if (valid) {
      q += (work.q_begin + row_token(params_, work, 0, row)) * attention.q_token_stride +
           row_head(params_, work, row) * attention.q_head_stride;
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = step * 16 + half * 8 + lane_ % 4 * 2;
        queries_[step][half] =
            valid && column < attention.head_dim ? *reinterpret_cast<const uint32_t*>(q + column) : 0;
      }
    }
  }

  __device__ void find_rows(const WorkTile& work) {
#pragma unroll
    for (int i = 0; i < 2; ++i) seen_[i] = row_keys(params_, work, 0, row_of(i));
  }

  __device__ void release(int stage) {
    __syncwarp();
    if (lane_ == 0) shared_.empty[stage].arrive();
  }

  // Raw scores of the warp's 16 keys of a key tile, the i-th of its segment from the last.
  __device__ void score(int block, int i, float (&scores)[4]) {
    shared_.full[at_.stage].wait(at_.phase);
    const int row = warp_ * 16 + lane_ % 16;
#pragma unroll
    for (float& score : scores) score = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t k[4];
      load_matrices(k, &shared_.stages[at_.stage][step / 4][row][((step % 4 * 2 + lane_ / 16) ^ row % 8) * 8]);
      multiply_add<Config::kQ>(scores, k, queries_[step][0], queries_[step][1]);
    }
    release(at_.stage);
    at_.advance();
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int place = warp_ * 16 + lane_ / 4 + x / 2 * 8;
      const int key = block * Config::kKeys + place;
      if (key < seen_[x % 2].begin || key >= seen_[x % 2].end) scores[x] = -infinity();
      shared_.scores[i][row_of(x % 2) * Config::kRowPitch + place] = scores[x];
    }
  }

  __device__ void put_weights(int i, const float (&weights)[4]) {
    shared_.weights[i][warp_][lane_] = {transposed_8x8(pack<Config::kQ>(weights[0], weights[1])),
                                        transposed_8x8(pack<Config::kQ>(weights[2], weights[3]))};
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
      float weights[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) weights[x] = exp2_fast(__fmaf_rn(scores[x], factor, -base[x % 2]));
      // A thread of prefill adds up 32 weights of a key tile.
#pragma unroll
      for (int x = 0; x < 4; ++x) grown = grown || !(weights[x] <= Config::kMostSum / (Config::kKeys / 4));
      put_weights(i, weights);
      if (i + 1 == count) break;
      score(segment.last - i - 1, i + 1, scores);
    }
    if (!any_computing<Config>(grown)) return false;
    if (warp_ < Config::kRows) raise_row(count, factor);
    computing_meet<Config>();
#pragma unroll 1
    for (int i = 1; i < count; ++i) {
      float weights[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int place = warp_ * 16 + lane_ / 4 + x / 2 * 8;
        weights[x] = exp2_fast(__fmaf_rn(shared_.scores[i][row_of(x % 2) * Config::kRowPitch + place], factor,
                                         -shared_.base[i][row_of(x % 2)]));
      }
      put_weights(i, weights);
    }
    computing_meet<Config>();
    return true;
  }

  // That of the thread's rows: the largest score of the segment's last key tile. For all its key tiles, for the time
  // being.
  __device__ void find_base(float factor, const float (&scores)[4], float (&base)[2]) {
    float most[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      most[i] = fmaxf(scores[i], scores[2 + i]);
#pragma unroll
      for (int step = 4; step <= 16; step *= 2) most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], step));
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

  // The sum that thread lane % 8 / 2 of a row has of a key tile's weights in prefill: of 16 even and 16 odd keys.
  __device__ float sum_tile(int i, float factor, float base) const {
    const float* scores = shared_.scores[i] + warp_ * Config::kRowPitch + lane_ % 8;
    float total = 0;
#pragma unroll
    for (int key = 0; key < Config::kKeys; key += 8) {
      total = __fadd_rn(total, exp2_fast(__fmaf_rn(scores[key], factor, -base)));
    }
    return __fadd_rn(total, __shfl_xor_sync(~0u, total, 1));
  }

  // The bases of row `warp`, which rise where a key tile's weights have outgrown them.
  __device__ void raise_row(int count, float factor) {
    float base = shared_.base[0][warp_];
#pragma unroll 1
    for (int i = 1; i < count; ++i) {
      if (__any_sync(~0u, !(sum_tile(i, factor, base) <= Config::kMostSum))) {
        float most = -infinity();
        for (int key = lane_; key < Config::kKeys; key += 32) {
          most = fmaxf(most, shared_.scores[i][warp_ * Config::kRowPitch + key]);
        }
        for (int step = 1; step <= 16; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        base = fmaxf(base, most * factor);
      }
      if (lane_ == 0) shared_.base[i][warp_] = base;
    }
    __syncwarp();
  }

  // What weights of the key tile before shrink by; 1 if the base stayed.
  __device__ float rescale(int i, int row) const {
    return exp2_fast(shared_.base[i - 1][row] - shared_.base[i][row]);
  }

  // The sum of row `warp`. Eight lanes have a key tile.
  __device__ void sum_row(int count, float factor) {
    float totals[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int i = min(lane_ / 8 + 4 * n, count - 1);
      totals[n] = sum_tile(i, factor, shared_.base[i][warp_]);
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < Config::kSegmentBlocks; ++i) {
      const float total = __shfl_sync(~0u, totals[i / 4], i % 4 * 8 + lane_ % 8);
      if (i < count) sum = i == 0 ? total : __fadd_rn(__fmul_rn(sum, rescale(i, warp_)), total);
    }
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 4));
    if (lane_ == 0) shared_.sums[warp_] = {shared_.base[count - 1][warp_], sum};
  }

  // Makes the warp's columns of V zero where keys are not the request's: weight 0 times what lies there may be NaN.
  __device__ void clear_strangers(const WorkTile& work, int block, uint16_t (*columns)[kSwizzledColumns]) {
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
          const uint2 weights = shared_.weights[i][step][lane_];
          const int key = step * 16 + lane_ % 8 + lane_ / 16 * 8;
          uint32_t v[4];
          load_matrices_transposed(v, &columns[key][((warp_ % 4 * 2 + lane_ / 8 % 2) ^ key % 8) * 8]);
          multiply_add<Config::kQ>(values, v, weights.x, weights.y);
        }
      }
      release(at_.stage);
      at_.advance();
    }
  }

  // Joins the segment with the later ones, or leaves it to whoever joins the cut tile's.
  __device__ void end_segment(const CutSlot& slot, const SegmentWalk<Config>& segment, const float (&values)[4],
                              bool later, float4& sum, RowSums (&sums)[2]) {
    const RowSums own[2] = {shared_.sums[row_of(0)], shared_.sums[row_of(1)]};
    if (is_cut(slot)) {
      const int at = partial_row(params_, slot, segment.last / Config::kSegmentBlocks - slot.cut.first);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int row = row_of(x % 2);
        const int column = warp_ * 16 + lane_ / 4 + x / 2 * 8;
        if (row >= rows(slot.work) || column >= Config::kHeadDimV) continue;
        params_.segments.out[static_cast<int64_t>(at + row) * Config::kHeadDimV + column] = values[x];
        if (column == 0) params_.segments.sums[at + row] = own[x % 2];
      }
      return;
    }
    Join join[2] = {kNoneLater, kNoneLater};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (later) {
        join[i] = join_rows(sums[i], own[i]);
      } else {
        sums[i] = own[i];
      }
    }
    sum = {join_values(join[0], sum.x, values[0]), join_values(join[1], sum.y, values[1]),
           join_values(join[0], sum.z, values[2]), join_values(join[1], sum.w, values[3])};
  }

  __device__ uint16_t* out_of(const WorkTile& work, int row, int column) const {
    const AttentionParams& attention = params_.attention;
    return static_cast<uint16_t*>(attention.out) +
           (work.q_begin + row_token(params_, work, 0, row)) * attention.out_token_stride +
           row_head(params_, work, row) * attention.out_head_stride + column;
  }

  __device__ void store(const WorkTile& work, const float4& sum, const RowSums (&sums)[2]) {
    if (warp_ * 16 >= Config::kHeadDimV) return;
    const bool writes = warp_ == 0 && lane_ < 4;
    const float factor[2] = {finish_row(params_, work, 0, row_of(0), sums[0], writes),
                             finish_row(params_, work, 0, row_of(1), sums[1], writes)};
    const uint32_t low = pack<Config::kQ>(mean(sum.x, factor[0]), mean(sum.y, factor[1]));
    const uint32_t high = pack<Config::kQ>(mean(sum.z, factor[0]), mean(sum.w, factor[1]));
    const uint32_t pairs[2] = {transposed_8x8(low), transposed_8x8(high)};
    const int row = lane_ / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = warp_ * 16 + half * 8 + lane_ % 4 * 2;
      if (row >= rows(work) || column >= params_.attention.head_dim_v) continue;
      *reinterpret_cast<uint32_t*>(out_of(work, row, column)) = pairs[half];
    }
  }

  // The block that stores the last missing segments of a cut tile adds them all up.
  __device__ void join_cut(const CutSlot& slot) {
    computing_meet<Config>();  // all have stored
    if (threadIdx.x == 0) shared_.joins = last_stored(params_, slot);
    computing_meet<Config>();
    if (!shared_.joins) return;
    const WorkTile& work = slot.work;
    constexpr int kLanes = Config::kHeadDimV / 4;  // of a row
    constexpr int kAhead = 8;                      // segments on their way
    const int row = threadIdx.x / kLanes;
    const int column = threadIdx.x % kLanes * 4;
    if (row >= rows(work)) return;
    RowSums sums = {kNothing, 0};
    float4 values = {};
#pragma unroll 1
    for (int last = slot.cut.count - 1; last >= 0; last -= kAhead) {
      RowSums own_sums[kAhead];
      float4 own[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t at = partial_row(params_, slot, max(last - i, 0)) + row;
        const float2 found = __ldcg(reinterpret_cast<const float2*>(params_.segments.sums + at));
        own_sums[i] = last - i < 0 ? RowSums{kNothing, 0} : RowSums{found.x, found.y};
        own[i] = __ldcg(reinterpret_cast<const float4*>(params_.segments.out + at * Config::kHeadDimV + column));
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const Join join = join_rows(sums, own_sums[i]);
        values = join_values(join, values, own[i]);
      }
    }
    const float factor = finish_row(params_, work, 0, row, sums, column == 0);
    if (column >= params_.attention.head_dim_v) return;
    *reinterpret_cast<uint2*>(out_of(work, row, column)) = {
        pack<Config::kQ>(mean(values.x, factor), mean(values.y, factor)),
        pack<Config::kQ>(mean(values.z, factor), mean(values.w, factor))};
  }

  const PrefillParams& params_;
  SharedMemory& shared_;
  const int warp_, lane_;
  Ring<Config::kStages> at_;
  uint32_t queries_[kSteps][2];
  Interval seen_[2];
};

template <int kDim, Type kQuery>
__device__ void EightRowsConfig<kDim, kQuery>::run(const PrefillParams& params) {
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
    fence_barrier_init();
  }
  __syncthreads();
  // As in sm90/decode: the list and the page table are complete in the L2 once a layer has waited for them.
  if (!params.list_settled) wait_for_previous_kernel();
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
