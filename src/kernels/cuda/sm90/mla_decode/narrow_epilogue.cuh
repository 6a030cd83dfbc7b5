// SPDX-License-Identifier: Apache-2.0
// What a thread of a narrow block has of the result, and its way to memory.
#pragma once

#include "kernels/cuda/sm90/mla_decode/epilogue.cuh"

namespace fovea::kernels::cuda {

// Of a thread: scores[4 * j + i] is key thread_row(i / 2), query row 8 * j + lane % 4 * 2 + i % 2; so is
// out[t][4 * j + i] with value column 64 * t + thread_row(i / 2) of the warpgroup's half.
template <class C>
struct NarrowState {
  float out[C::kHalfTiles][C::kRows / 2];
  float most[C::kRows / 4];  // as ScoreRow::most, of query row column_of(i)
  float sum[C::kRows / 4];   // of this thread's keys
};

__device__ __forceinline__ int column_of(int i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }
// The place of column_of(i), key thread_row(half), among the scores.
__device__ __forceinline__ constexpr int score_of(int i, int half) {
  return i / 2 * 4 + half * 2 + i % 2;
}

// A key tile's scores to weights; state: NarrowState or Fp8State. most: of this warp's keys, maxima: of every
// warp's.
template <class C, class State>
__device__ __forceinline__ void weigh_columns(const float (&maxima)[4][C::kRows], float factor,
                                              float (&most)[C::kRows / 4],
                                              float (&scores)[C::kRows / 2], State& state) {
  float rescale[C::kRows / 4];
  bool moved = false;
#pragma unroll
  for (int i = 0; i < C::kRows / 4; ++i) {
#pragma unroll
    for (int w = 0; w < 4; ++w) most[i] = fmaxf(most[i], maxima[w][column_of(i)]);
    const bool moves = most[i] * factor > state.most[i] + kMaximumLag;
    const float next = moves ? most[i] * factor : state.most[i];
    rescale[i] = exp2_fast(state.most[i] - next);
    state.most[i] = next;
    moved |= moves;
  }
  if (__any_sync(~0u, moved)) {
#pragma unroll
    for (int i = 0; i < C::kRows / 4; ++i) state.sum[i] *= rescale[i];
#pragma unroll
    for (auto& tile : state.out) {
#pragma unroll
      for (int i = 0; i < C::kRows / 2; ++i) tile[i] *= rescale[i / 4 * 2 + i % 2];
    }
  }
#pragma unroll
  for (int i = 0; i < C::kRows / 4; ++i) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float& score = scores[score_of(i, row)];
      score = exp2_fast(fmaf(score, factor, -state.most[i]));
      state.sum[i] += score;
    }
  }
}

// The largest value of query row column_of(i) among the warp's columns.
template <class C>
__device__ __forceinline__ float largest_of(const NarrowState<C>& state, int i) {
  float most = 0;
#pragma unroll
  for (const auto& tile : state.out) {
#pragma unroll
    for (int r = 0; r < 2; ++r) most = fmaxf(most, fabsf(tile[score_of(i, r)]));
  }
#pragma unroll
  for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  return most;
}

// Sums over all keys; factors: what values are to be multiplied by, for parts in multiples of a
// unit for each half of the columns. One warpgroup.
template <class C>
__device__ __forceinline__ void finish_columns(const MlaDecodeParams& params,
                                               typename C::SharedMemory& shared,
                                               const RowTile& tile, int half,
                                               const NarrowState<C>& state,
                                               float (&factors)[C::kRows / 4]) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x % kWarpgroupThreads / 32;
  const bool part = tile.item.partial >= 0;
  // Where scores were: the next ones come behind the barrier at which parts are counted.
  auto& largest = reinterpret_cast<float(&)[4][C::kRows]>(shared.scores[half]);
  named_barrier_wait(2 + half, kWarpgroupThreads);  // the sums of the item before have been read
#pragma unroll
  for (int i = 0; i < C::kRows / 4; ++i) {
    float sum = state.sum[i];
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane < 4) shared.sums[half][warp][column_of(i)] = sum;
    if (!part) continue;
    const float most = largest_of(state, i);
    if (lane < 4) largest[warp][column_of(i)] = most;
  }
  named_barrier_wait(2 + half, kWarpgroupThreads);
#pragma unroll
  for (int i = 0; i < C::kRows / 4; ++i) {
    const int row = column_of(i);
    float sum = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) sum += shared.sums[half][w][row];
    factors[i] = sum > 0 ? __fdividef(1.0f, sum) : 0;
    const bool stores = warp == 0 && lane < 4 && row < tile.rows;
    if (part) {
      float most = 0;
#pragma unroll
      for (int w = 0; w < 4; ++w) most = fmaxf(most, largest[w][row]);
      const uint32_t unit = unit_bits(most * factors[i]);
      factors[i] *= __uint_as_float((254u << 23) - unit);
      if (stores) {
        params.work.partial_units[2 * part_row<C>(tile, row) + half] = __uint_as_float(unit);
      }
    }
    if (half == 1 || !stores) continue;
    const float lse = sum > 0 ? (state.most[i] + log2f(sum)) * kLn2 : -infinity();
    if (part) {
      params.work.partial_lse[part_row<C>(tile, row)] = lse;
    } else if (params.lse) {
      params.lse[static_cast<int64_t>(tile.view.q_begin) * params.q_heads + tile.first_row +
                 row] = lse;
    }
  }
}

// Eight lanes have neighbouring columns of a row. Two with neighbouring columns of two rows swap,
// each then has a pair of one row.
template <class C, Type kTo>
__device__ __forceinline__ void store_columns(uint16_t* to, bool valid, int j,
                                              const NarrowState<C>& state,
                                              const float (&factors)[C::kRows / 4]) {
  const bool odd = threadIdx.x / 4 % 2;
#pragma unroll
  for (int t = 0; t < C::kHalfTiles; ++t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float even_row = state.out[t][4 * j + 2 * r] * factors[2 * j];
      const float odd_row = state.out[t][4 * j + 2 * r + 1] * factors[2 * j + 1];
      const float got = __shfl_xor_sync(~0u, odd ? even_row : odd_row, 4);
      const uint32_t word = odd ? pack<kTo>(got, odd_row) : pack<kTo>(even_row, got);
      const int column = t * kTileColumns + (thread_row(r) & ~1);
      if (valid) *reinterpret_cast<uint32_t*>(to + column) = word;
    }
  }
}

template <class C>
__device__ __forceinline__ void store_half(const MlaDecodeParams& params, const RowTile& tile,
                                           int half, const NarrowState<C>& state,
                                           const float (&factors)[C::kRows / 4]) {
#pragma unroll
  for (int j = 0; j < C::kRows / 8; ++j) {
    const int row = column_of(2 * j + threadIdx.x / 4 % 2);
    const bool valid = row < tile.rows;
    if (tile.item.partial >= 0) {
      uint16_t* to = static_cast<uint16_t*>(params.work.partial_out) +
                     part_row<C>(tile, row) * C::kRank + half * C::kValueColumns;
      store_columns<C, f16>(to, valid, j, state, factors);
    } else {
      store_columns<C, C::kQ>(output_row<C>(params, tile, half, valid ? row : 0), valid, j, state,
                              factors);
    }
  }
}

}  // namespace fovea::kernels::cuda
