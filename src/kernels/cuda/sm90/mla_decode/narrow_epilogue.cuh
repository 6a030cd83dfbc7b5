// SPDX-License-Identifier: Apache-2.0
// What a thread of a narrow block has of the result, and its way to memory.
#pragma once

#include "kernels/cuda/sm90/mla_decode/mainloop.cuh"

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

// Sums over all keys; the inverse is what values are to be multiplied by. One warpgroup.
template <class C>
__device__ __forceinline__ void finish_columns(const MlaDecodeParams& params,
                                               typename C::SharedMemory& shared,
                                               const RowTile& tile, int half,
                                               const NarrowState<C>& state,
                                               float (&inverse)[C::kRows / 4]) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x % kWarpgroupThreads / 32;
  named_barrier_wait(2 + half, kWarpgroupThreads);  // the sums of the item before have been read
#pragma unroll
  for (int i = 0; i < C::kRows / 4; ++i) {
    float sum = state.sum[i];
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane < 4) shared.sums[half][warp][column_of(i)] = sum;
  }
  named_barrier_wait(2 + half, kWarpgroupThreads);
#pragma unroll
  for (int i = 0; i < C::kRows / 4; ++i) {
    const int row = column_of(i);
    float sum = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) sum += shared.sums[half][w][row];
    inverse[i] = sum > 0 ? __fdividef(1.0f, sum) : 0;
    if (half == 1 || warp > 0 || lane >= 4 || row >= tile.rows) continue;
    const float lse = sum > 0 ? (state.most[i] + log2f(sum)) * kLn2 : -infinity();
    if (tile.item.partial >= 0) {
      params.work.partial_lse[part_row<C>(tile.item, row)] = lse;
    } else if (params.lse) {
      params.lse[static_cast<int64_t>(tile.view.q_begin) * params.q_heads + tile.first_row +
                 row] = lse;
    }
  }
}

// Eight lanes have neighbouring columns of a row.
template <class C>
__device__ __forceinline__ void store_half(const MlaDecodeParams& params, const RowTile& tile,
                                           int half, const NarrowState<C>& state,
                                           const float (&inverse)[C::kRows / 4]) {
  const bool odd = threadIdx.x / 4 % 2;
#pragma unroll
  for (int j = 0; j < C::kRows / 8; ++j) {
    if (tile.item.partial >= 0) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = column_of(2 * j + c);
        if (row >= tile.rows) continue;
        float* to = static_cast<float*>(params.work.partial_out) +
                    part_row<C>(tile.item, row) * C::kRank + half * C::kValueColumns;
#pragma unroll
        for (int t = 0; t < C::kHalfTiles; ++t) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            to[t * kTileColumns + thread_row(r)] =
                state.out[t][4 * j + 2 * r + c] * inverse[2 * j + c];
          }
        }
      }
    } else {
      // Two lanes with neighbouring columns of two rows swap, each then has a pair of one row.
      const int row = column_of(2 * j + odd);
      const bool valid = row < tile.rows;
      const int packed = tile.first_row + (valid ? row : 0);
      const int64_t token = tile.view.q_begin + packed / params.q_heads;
      uint16_t* to = static_cast<uint16_t*>(params.out) + token * params.out_token_stride +
                     packed % params.q_heads * params.out_head_stride +
                     half * C::kValueColumns;
#pragma unroll
      for (int t = 0; t < C::kHalfTiles; ++t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float even_row = state.out[t][4 * j + 2 * r] * inverse[2 * j];
          const float odd_row = state.out[t][4 * j + 2 * r + 1] * inverse[2 * j + 1];
          const float got = __shfl_xor_sync(~0u, odd ? even_row : odd_row, 4);
          const uint32_t word = odd ? pack<C::kQ>(got, odd_row) : pack<C::kQ>(even_row, got);
          const int column = t * kTileColumns + (thread_row(r) & ~1);
          if (valid) *reinterpret_cast<uint32_t*>(to + column) = word;
        }
      }
    }
  }
}

}  // namespace fovea::kernels::cuda
