// SPDX-License-Identifier: Apache-2.0
// What a thread of a narrow fp8 block has of the result, the join of its two warpgroups, and the
// way to memory.
#pragma once

#include "kernels/cuda/sm90/mla_decode/epilogue.cuh"

namespace fovea::kernels::cuda {

// Of a thread: scores[4 * j + i] is key thread_row(i / 2), query row 8 * j + lane % 4 * 2 + i % 2;
// out[t][4 * j + i] is that row's value column 64 * t + 16 * warp + lane / 4 * 2 + i / 2.
template <class C>
struct Fp8State {
  float out[C::kLatentTiles][C::kRows / 2];
  float most[C::kRows / 4];  // as ScoreRow::most, of query row column_of(i)
  float sum[C::kRows / 4];   // of this thread's keys
};

__device__ __forceinline__ int column_of(int i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }
// The place of column_of(i), key thread_row(half), among the scores.
__device__ __forceinline__ constexpr int score_of(int i, int half) {
  return i / 2 * 4 + half * 2 + i % 2;
}

// A key tile's scores to weights. most: of this warp's keys, maxima: of every warp's.
template <class C>
__device__ __forceinline__ void weigh_columns(const float (&maxima)[4][C::kRows], float factor,
                                              float (&most)[C::kRows / 4],
                                              float (&scores)[C::kRows / 2], Fp8State<C>& state) {
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

// What the values of this warpgroup are to be multiplied by, and the LSE of all keys.
template <class C>
__device__ __forceinline__ void find_factors(const MlaDecodeParams& params,
                                             typename C::SharedMemory& shared, const RowTile& tile,
                                             int group, const Fp8State<C>& state,
                                             float (&factors)[C::kRows / 4]) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x % kWarpgroupThreads / 32;
#pragma unroll
  for (int i = 0; i < C::kRows / 4; ++i) {
    float sum = state.sum[i];
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane < 4) {
      shared.sums[group][warp][column_of(i)] = sum;
      if (warp == 0) shared.maxima[group][0][column_of(i)] = state.most[i];
    }
  }
  named_barrier_wait(1, 2 * kWarpgroupThreads);
#pragma unroll
  for (int i = 0; i < C::kRows / 4; ++i) {
    const int row = column_of(i);
    const float most = fmaxf(shared.maxima[0][0][row], shared.maxima[1][0][row]);
    float total = 0;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < 4; ++w) sum += shared.sums[g][w][row];
      total += sum * exp2_fast(shared.maxima[g][0][row] - most);
    }
    factors[i] = total > 0 ? value_scale<C>(params) / total * exp2_fast(state.most[i] - most) : 0;
    if (group == 1 || warp > 0 || lane >= 4 || row >= tile.rows) continue;
    const float lse = total > 0 ? (most + log2f(total)) * kLn2 : -infinity();
    if (tile.item.partial >= 0) {
      params.work.partial_lse[static_cast<int64_t>(tile.item.partial) * C::kRows + row] = lse;
    } else if (params.lse) {
      params.lse[static_cast<int64_t>(tile.view.q_begin) * params.q_heads + tile.first_row + row] =
          lse;
    }
  }
}

// Eight lanes have neighbouring pairs of columns of a row.
template <class C>
__device__ __forceinline__ void store_fp8_tile(const MlaDecodeParams& params, const RowTile& tile,
                                               int t, const float (&out)[C::kRows / 2]) {
  const int column =
      t * kTileColumns + threadIdx.x % kWarpgroupThreads / 32 * 16 + threadIdx.x % 32 / 4 * 2;
#pragma unroll
  for (int i = 0; i < C::kRows / 4; ++i) {
    const int row = column_of(i);
    if (row >= tile.rows) continue;
    const float pair[2] = {out[score_of(i, 0)], out[score_of(i, 1)]};
    if (tile.item.partial >= 0) {
      float* to = static_cast<float*>(params.work.partial_out) +
                  (static_cast<int64_t>(tile.item.partial) * C::kRows + row) * C::kRank + column;
      *reinterpret_cast<float2*>(to) = {pair[0], pair[1]};
    } else {
      const int packed = tile.first_row + row;
      const int64_t token = tile.view.q_begin + packed / params.q_heads;
      uint16_t* to = static_cast<uint16_t*>(params.out) + token * params.out_token_stride +
                     packed % params.q_heads * params.out_head_stride + column;
      *reinterpret_cast<uint32_t*>(to) = pack<C::kQ>(pair[0], pair[1]);
    }
  }
}

// The sum of both warpgroups' results to memory: each stores half of the columns. All 256 threads.
template <class C>
__device__ __forceinline__ void join_groups(const MlaDecodeParams& params,
                                            typename C::SharedMemory& shared, const RowTile& tile,
                                            int group, Fp8State<C>& state) {
  constexpr int kHalf = C::kLatentTiles / 2;
  constexpr int kRowValues = C::kRows / 2;
  const int thread = threadIdx.x % kWarpgroupThreads;
  float factors[C::kRows / 4];
  find_factors<C>(params, shared, tile, group, state, factors);
#pragma unroll
  for (int t = 0; t < C::kLatentTiles; ++t) {
#pragma unroll
    for (int i = 0; i < kRowValues; ++i) state.out[t][i] *= factors[i / 4 * 2 + i % 2];
  }
#pragma unroll
  for (int first = 0; first < kHalf * kRowValues; first += C::kExchanged) {
    if (first > 0) named_barrier_wait(1, 2 * kWarpgroupThreads);  // the last ones have been read
#pragma unroll
    for (int n = 0; n < C::kExchanged; ++n) {
      const int t = (first + n) / kRowValues;
      const int i = (first + n) % kRowValues;
      if (t >= kHalf) break;
      // Registers have no index at run time.
      shared.exchange[group][n][thread] = group == 0 ? state.out[kHalf + t][i] : state.out[t][i];
    }
    named_barrier_wait(1, 2 * kWarpgroupThreads);
#pragma unroll
    for (int n = 0; n < C::kExchanged; ++n) {
      const int t = (first + n) / kRowValues;
      const int i = (first + n) % kRowValues;
      if (t >= kHalf) break;
      const float other = shared.exchange[group ^ 1][n][thread];
      if (group == 0) {
        state.out[t][i] += other;
      } else {
        state.out[kHalf + t][i] += other;
      }
    }
  }
#pragma unroll
  for (int t = 0; t < C::kLatentTiles; ++t) {
    if (t / kHalf == group) store_fp8_tile<C>(params, tile, t, state.out[t]);
  }
}

}  // namespace fovea::kernels::cuda
