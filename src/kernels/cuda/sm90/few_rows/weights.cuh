// SPDX-License-Identifier: Apache-2.0
// From a segment's keys to weights and their sums, added in the order of sm90/prefill.
#pragma once

#include "kernels/cuda/sm90/few_rows/config.cuh"

namespace fovea::kernels::cuda {

// Waits for all computing warps; the second function returns whether any thread passes true.
template <class Config>
__device__ __forceinline__ void meet_computing() {
  named_barrier_wait(kComputingBarrier, Config::kComputing);
}
template <class Config>
__device__ __forceinline__ bool any_computing(bool value) {
  return named_barrier_any(kComputingBarrier, Config::kComputing, value);
}

// The part of a computing warp that finds weights. Lane l has the rows 2 (l % 4) and 2 (l % 4) + 1,
// and keys or columns l / 4 and l / 4 + 8 of each 16.
template <class Config>
class SegmentWeights {
 protected:
  using SharedMemory = typename Config::SharedMemory;
  static constexpr int kSteps = Config::kHeadDim / 16;

  __device__ SegmentWeights(const PrefillParams& params, SharedMemory& shared)
      : params_(params), shared_(shared), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32) {}

  __device__ int row_of(int i) const { return lane_ % 4 * 2 + i; }
  // Returns the place of the thread's key i within a key tile.
  __device__ int place_of(int i) const { return warp_ * 16 + lane_ / 4 + i * 8; }
  __device__ int rows(const WorkTile& work) const { return work.q_len << params_.heads_shift; }

  // Reads the queries as right operands: lane l has row l / 4.
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
        queries_[step][half] = valid && column < attention.head_dim
                                   ? *reinterpret_cast<const uint32_t*>(q + column)
                                   : 0;
      }
    }
  }

  __device__ void find_rows(const WorkTile& work) {
    const RequestView view = {work.request, work.q_begin, work.q_len, work.kv_len};
#pragma unroll
    for (int i = 0; i < 2; ++i) seen_[i] = row_keys(params_, work, view, 0, row_of(i));
  }

  __device__ void multiply_keys(
      const uint16_t (&keys)[Config::kDimBlocks][Config::kKeys][kSwizzledColumns],
      float (&scores)[4]) const {
    const int row = warp_ * 16 + lane_ % 16;
#pragma unroll
    for (float& score : scores) score = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t k[4];
      load_matrices(k, &keys[step / 4][row][((step % 4 * 2 + lane_ / 16) ^ row % 8) * 8]);
      multiply_add<Config::kQ>(scores, k, queries_[step][0], queries_[step][1]);
    }
  }

  // Hides keys that rows do not see and stores the raw scores of key tile i of the segment.
  __device__ void keep_scores(int block, int i, float (&scores)[4]) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int place = place_of(x / 2);
      const int key = block * Config::kKeys + place;
      if (key < seen_[x % 2].begin || key >= seen_[x % 2].end) scores[x] = -infinity();
      shared_.scores[i][row_of(x % 2) * Config::kRowPitch + place] = scores[x];
    }
  }

  // Stores the weights of these scores, and returns whether a row may have outgrown its base: in
  // sm90/prefill a thread adds up 32 weights of a key tile.
  __device__ bool put_weights(int i, const float (&scores)[4], float factor,
                              const float (&base)[2]) {
    float weights[4];
    bool grown = false;
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      weights[x] = exp2_fast(__fmaf_rn(scores[x], factor, -base[x % 2]));
      grown = grown || !(weights[x] <= Config::kMaxSum / (Config::kKeys / 4));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      shared_.weights[i][warp_][half][lane_] =
          transposed_8x8(pack<Config::kQ>(weights[2 * half], weights[2 * half + 1]));
    }
    return grown;
  }

  // Finds the weights of all key tiles but the first again, with bases that rise within the
  // segment.
  __device__ void weigh_raised(int count, float factor) {
    if (warp_ < Config::kRows) raise_row(warp_, count, factor);
    meet_computing<Config>();
#pragma unroll 1
    for (int i = 1; i < count; ++i) {
      weigh_kept(i, factor, {shared_.base[i][row_of(0)], shared_.base[i][row_of(1)]});
    }
    meet_computing<Config>();
  }

  // Stores the weights of the warp's kept scores of a key tile; returns as put_weights().
  __device__ bool weigh_kept(int i, float factor, const float (&base)[2]) {
    float scores[4];
    read_kept(i, scores);
    return put_weights(i, scores, factor, base);
  }
  __device__ void read_kept(int i, float (&scores)[4]) const {
#pragma unroll
    for (int x = 0; x < 4; ++x)
      scores[x] = shared_.scores[i][row_of(x % 2) * Config::kRowPitch + place_of(x / 2)];
  }

  // Returns the sum of a key tile's weights that thread lane % 8 / 2 of a row has in sm90/prefill:
  // that of 16 even and 16 odd keys.
  __device__ float sum_tile(int row, int i, float factor, float base) const {
    const float* scores = shared_.scores[i] + row * Config::kRowPitch + lane_ % 8;
    float total = 0;
#pragma unroll
    for (int key = 0; key < Config::kKeys; key += 8) {
      total = __fadd_rn(total, exp2_fast(__fmaf_rn(scores[key], factor, -base)));
    }
    return __fadd_rn(total, __shfl_xor_sync(~0u, total, 1));
  }

  // Finds the bases of a row, which rise at each key tile whose weights outgrow them. A warp calls
  // it.
  __device__ void raise_row(int row, int count, float factor) {
    float base = shared_.base[0][row];
#pragma unroll 1
    for (int i = 1; i < count; ++i) {
      if (__any_sync(~0u, !(sum_tile(row, i, factor, base) <= Config::kMaxSum))) {
        float max_score = -infinity();
        for (int key = lane_; key < Config::kKeys; key += 32) {
          max_score = fmaxf(max_score, shared_.scores[i][row * Config::kRowPitch + key]);
        }
        for (int step = 1; step <= 16; step *= 2)
          max_score = fmaxf(max_score, __shfl_xor_sync(~0u, max_score, step));
        base = fmaxf(base, max_score * factor);
      }
      if (lane_ == 0) shared_.base[i][row] = base;
    }
    __syncwarp();
  }

  // Returns the factor of the sums before key tile i: 1 if the base stayed.
  __device__ float rescale(int i, int row) const {
    return exp2_fast(shared_.base[i - 1][row] - shared_.base[i][row]);
  }

  // Finds the sum of a row's weights. A warp calls it, and eight lanes have a key tile.
  __device__ void sum_row(int row, int count, float factor) {
    float totals[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int i = min(lane_ / 8 + 4 * n, count - 1);
      totals[n] = sum_tile(row, i, factor, shared_.base[i][row]);
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < Config::kSegmentBlocks; ++i) {
      const float total = __shfl_sync(~0u, totals[i / 4], i % 4 * 8 + lane_ % 8);
      if (i < count) sum = i == 0 ? total : __fadd_rn(__fmul_rn(sum, rescale(i, row)), total);
    }
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 4));
    if (lane_ == 0) shared_.sums[row] = {shared_.base[count - 1][row], sum};
  }

  const PrefillParams& params_;
  SharedMemory& shared_;
  const int warp_, lane_;
  uint32_t queries_[kSteps][2];
  Interval seen_[2];
};

}  // namespace fovea::kernels::cuda
