// SPDX-License-Identifier: Apache-2.0
// Joins the sums of the two warpgroups and stores them.
#pragma once

#include "kernels/cuda/sm90/mla_common/masks.cuh"
#include "kernels/cuda/sm90/mla_decode_fp8_narrow/config.cuh"

namespace fovea::kernels::cuda {

// Stores the sum of both warpgroups' results; each stores half of the columns. All consumer
// threads.
template <class C>
class GroupJoin {
 public:
  __device__ __forceinline__ GroupJoin(const MlaDecodeParams& params,
                                       typename C::SharedMemory& shared, const RowTile& tile,
                                       int group)
      : params_(params), shared_(shared), tile_(tile), group_(group) {}

  __device__ __forceinline__ void run(Sums<C>& sums) const {
    float factors[C::kRows / 4];
    find_factors(sums, factors);
#pragma unroll
    for (int t = 0; t < C::kLatentTiles; ++t) {
#pragma unroll
      for (int i = 0; i < kRowValues; ++i) sums.out[t][i] *= factors[i / 4 * 2 + i % 2];
    }
    exchange(sums);
#pragma unroll
    for (int t = 0; t < C::kLatentTiles; ++t) {
      if (t / kHalf == group_) store(t, sums.out[t]);
    }
  }

 private:
  static constexpr int kHalf = C::kLatentTiles / 2;
  static constexpr int kRowValues = C::kRows / 2;

  // Finds the factors of this warpgroup's values, and stores the LSE of all keys.
  __device__ __forceinline__ void find_factors(const Sums<C>& sums,
                                               float (&factors)[C::kRows / 4]) const {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x % kWarpgroupThreads / 32;
#pragma unroll
    for (int i = 0; i < C::kRows / 4; ++i) {
      float sum = sums.sum[i];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane < 4) {
        shared_.sums[group_][warp][column_of(i)] = sum;
        if (warp == 0) shared_.maxima[group_][0][column_of(i)] = sums.max[i];
      }
    }
    sync_warpgroups();
#pragma unroll
    for (int i = 0; i < C::kRows / 4; ++i) {
      const int row = column_of(i);
      const float max = fmaxf(shared_.maxima[0][0][row], shared_.maxima[1][0][row]);
      float total = 0;
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) sum += shared_.sums[g][w][row];
        total += sum * exp2_fast(shared_.maxima[g][0][row] - max);
      }
      factors[i] = total > 0 ? value_scale<C>(params_) / total * exp2_fast(sums.max[i] - max) : 0;
      if (group_ == 1 || warp > 0 || lane >= 4 || row >= tile_.rows) continue;
      const float lse = total > 0 ? (max + log2f(total)) * kLn2 : -infinity();
      if (tile_.item.partial >= 0) {
        params_.work.partial_lse[static_cast<int64_t>(tile_.item.partial) * C::kRows + row] = lse;
      } else if (params_.out.lse) {
        params_.out.lse[static_cast<int64_t>(tile_.view.q_begin) * params_.q_heads +
                        tile_.first_row + row] = lse;
      }
    }
  }

  // Adds the other warpgroup's sums to the half of the columns that this one stores.
  __device__ __forceinline__ void exchange(Sums<C>& sums) const {
    const int thread = threadIdx.x % kWarpgroupThreads;
#pragma unroll
    for (int first = 0; first < kHalf * kRowValues; first += C::kExchanged) {
      if (first > 0) sync_warpgroups();  // the last ones have been read
#pragma unroll
      for (int n = 0; n < C::kExchanged; ++n) {
        const int t = (first + n) / kRowValues;
        const int i = (first + n) % kRowValues;
        if (t >= kHalf) break;
        // A branch, because registers cannot be indexed at run time.
        shared_.exchange[group_][n][thread] = group_ == 0 ? sums.out[kHalf + t][i] : sums.out[t][i];
      }
      sync_warpgroups();
#pragma unroll
      for (int n = 0; n < C::kExchanged; ++n) {
        const int t = (first + n) / kRowValues;
        const int i = (first + n) % kRowValues;
        if (t >= kHalf) break;
        const float other = shared_.exchange[group_ ^ 1][n][thread];
        if (group_ == 0) {
          sums.out[t][i] += other;
        } else {
          sums.out[kHalf + t][i] += other;
        }
      }
    }
  }

  // Stores column tile t. Eight lanes have neighbouring pairs of columns of a row.
  __device__ __forceinline__ void store(int t, const float (&out)[C::kRows / 2]) const {
    const int column =
        t * kTileColumns + threadIdx.x % kWarpgroupThreads / 32 * 16 + threadIdx.x % 32 / 4 * 2;
#pragma unroll
    for (int i = 0; i < C::kRows / 4; ++i) {
      const int row = column_of(i);
      if (row >= tile_.rows) continue;
      const float pair[2] = {out[score_of(i, 0)], out[score_of(i, 1)]};
      if (tile_.item.partial >= 0) {
        float* to = static_cast<float*>(params_.work.partial_out) +
                    (static_cast<int64_t>(tile_.item.partial) * C::kRows + row) * C::kRank + column;
        *reinterpret_cast<float2*>(to) = {pair[0], pair[1]};
      } else {
        const int packed = tile_.first_row + row;
        const int64_t token = tile_.view.q_begin + packed / params_.q_heads;
        uint16_t* to = static_cast<uint16_t*>(params_.out.data) + token * params_.out.token_stride +
                       packed % params_.q_heads * params_.out.head_stride + column;
        *reinterpret_cast<uint32_t*>(to) = pack<C::kQ>(pair[0], pair[1]);
      }
    }
  }

  const MlaDecodeParams& params_;
  typename C::SharedMemory& shared_;
  const RowTile& tile_;
  const int group_;
};

}  // namespace fovea::kernels::cuda
