// SPDX-License-Identifier: Apache-2.0
// What a thread of a block of 16 rows has of the result, and its way to memory or to other blocks.
#pragma once

#include "kernels/cuda/sm90/mla_decode/cluster_join.cuh"
#include "kernels/cuda/sm90/mla_decode/join.cuh"

namespace fovea::kernels::cuda {

// Row r, 0 or 1, of a thread.
__device__ __forceinline__ int row_of(int r) { return threadIdx.x % 32 / 4 + 8 * r; }
__device__ __forceinline__ int consumer_warp() { return static_cast<int>(threadIdx.x) / 32 - 4; }

// out[j][2 * r + c]: row_of(r), column 8 * j + lane % 4 * 2 + c of the warp's.
template <class C>
struct SixteenState {
  float out[C::kWarpColumns / 8][4] = {};
  float most[2] = {kLowest, kLowest};  // as ScoreRow::most
  float sum[2] = {};                   // of this thread's keys
};

template <class C>
struct SixteenProgress {
  Ring<C::kStages> keys;
  Ring<C::kRopeSlots> rope;
  uint32_t q_phase = 0;
};

// Of the warp's keys.
template <class C>
__device__ __forceinline__ float warp_sum(const SixteenState<C>& state, int r) {
  float sum = state.sum[r];
  sum += __shfl_xor_sync(~0u, sum, 1);
  return sum + __shfl_xor_sync(~0u, sum, 2);
}

// The largest value of row_of(r) among the warp's columns.
template <class C>
__device__ __forceinline__ float largest_own(const SixteenState<C>& state, int r) {
  float most = 0;
#pragma unroll
  for (const auto& columns : state.out) {
    most = fmaxf(most, fmaxf(fabsf(columns[2 * r]), fabsf(columns[2 * r + 1])));
  }
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  return fmaxf(most, __shfl_xor_sync(~0u, most, 2));
}

// A row tile, or a part of one: as f16, in multiples of a unit for each half of the columns. All
// 256 threads.
template <class C>
__device__ __forceinline__ void store_own(const MlaDecodeParams& params,
                                          typename C::SharedMemory& shared, const RowTile& tile,
                                          const SixteenState<C>& state) {
  const int lane = threadIdx.x % 32;
  const int warp = consumer_warp();
  const bool part = !C::kClusters && tile.item.partial >= 0;
  named_barrier_wait(kConsumersBarrier,
                     kConsumerThreads);  // sums of the item before have been read
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = warp_sum(state, r);
    const float most = part ? largest_own(state, r) : 0;
    if (lane % 4 == 0) {
      shared.sums[row_of(r)][warp] = sum;
      if (part) shared.maxima[row_of(r)][warp] = most;
    }
  }
  named_barrier_wait(kConsumersBarrier, kConsumerThreads);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row_of(r);
    float sum = 0;
#pragma unroll
    for (int w = 0; w < C::kConsumerWarps; ++w) sum += shared.sums[row][w];
    const float inverse = sum > 0 ? __fdividef(1.0f, sum) : 0;
    const bool valid = row < tile.rows;
    const int packed = tile.first_row + (valid ? row : 0);
    const int64_t token = tile.view.q_begin + packed / params.q_heads;
    const int head = packed % params.q_heads;
    const int64_t place = part ? part_row<C>(tile, row) : 0;
    if (valid && warp == 0 && lane % 4 == 0) {
      const float lse = sum > 0 ? (state.most[r] + log2f(sum)) * kLn2 : -infinity();
      if (part) {
        params.work.partial_lse[place] = lse;
      } else if (params.lse) {
        params.lse[token * params.q_heads + head] = lse;
      }
    }
    const int first = warp * C::kWarpColumns;
    if (part) {
      const int half = 2 * warp / C::kConsumerWarps;
      const auto& of_half = reinterpret_cast<const float4*>(shared.maxima[row])[half];
      const float most = fmaxf(fmaxf(of_half.x, of_half.y), fmaxf(of_half.z, of_half.w));
      const uint32_t unit = unit_bits(most * inverse);
      const float factor = inverse * __uint_as_float((254u << 23) - unit);
      if (valid && warp % 4 == 0 && lane % 4 == 0) {
        params.work.partial_units[2 * place + half] = __uint_as_float(unit);
      }
      uint16_t* to = static_cast<uint16_t*>(params.work.partial_out) + place * C::kRank + first;
#pragma unroll
      for (int j = 0; j < C::kWarpColumns / 8; j += 4) {
        uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          words[k] =
              pack<f16>(state.out[j + k][2 * r] * factor, state.out[j + k][2 * r + 1] * factor);
        }
        store_words(to + 8 * j, valid, words);
      }
      continue;
    }
    // Two lanes swap, each then has four columns in a row and four lanes 16.
    const bool odd = lane % 2;
    uint16_t* to = static_cast<uint16_t*>(params.out) + token * params.out_token_stride +
                   head * params.out_head_stride + first + odd * 8 + lane % 4 / 2 * 4;
#pragma unroll
    for (int j = 0; j < C::kWarpColumns / 8; j += 2) {
      const uint32_t low =
          pack<C::kQ>(state.out[j][2 * r] * inverse, state.out[j][2 * r + 1] * inverse);
      const uint32_t high =
          pack<C::kQ>(state.out[j + 1][2 * r] * inverse, state.out[j + 1][2 * r + 1] * inverse);
      const uint32_t got = __shfl_xor_sync(~0u, odd ? low : high, 1);
      const uint2 words = odd ? uint2{got, high} : uint2{low, got};
      if (valid) *reinterpret_cast<uint2*>(to + 8 * j) = words;
    }
  }
}

// What the block has, to where blocks of the cluster get it from; its own rows to where it adds
// them up.
template <class C>
__device__ __forceinline__ void put_down(typename C::SharedMemory& shared, const PartGroup& group,
                                         const SixteenState<C>& state) {
  const int lane = threadIdx.x % 32;
  const int warp = consumer_warp();
  const float most[2] = {largest_own(state, 0), largest_own(state, 1)};
  const float sums[2] = {warp_sum(state, 0), warp_sum(state, 1)};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t unit = unit_bits(most[r]);
    const float factor = __uint_as_float((254u << 23) - unit);
    const int joined = row_of(r) - group.own * group.share;  // row of this block's share
    auto& row = joined >= 0 && joined < group.rows
                    ? shared.cluster.joined[group.own * group.rows + joined]
                    : shared.cluster.own[row_of(r)];
    if (lane % 4 == 0) {
      row.units[warp] = __uint_as_float(unit);
      row.sums[warp] = sums[r];
      if (warp == 0) row.most = state.most[r];
    }
    uint16_t* to = row.values + warp * C::kWarpColumns + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < C::kWarpColumns / 8; ++j) {
      *reinterpret_cast<uint32_t*>(to + 8 * j) =
          pack<f16>(state.out[j][2 * r] * factor, state.out[j][2 * r + 1] * factor);
    }
  }
}

}  // namespace fovea::kernels::cuda
