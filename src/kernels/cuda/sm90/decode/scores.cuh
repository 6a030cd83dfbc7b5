// SPDX-License-Identifier: Apache-2.0
// Turns the products of a tile of keys into weights. A lane has query rows 2 * (lane % 4) and
// 2 * (lane % 4) + 1 of every eight, so that maxima and sums stay in its registers.
#pragma once

#include "kernels/cuda/common/score_mod.cuh"
#include "kernels/cuda/common/visibility.cuh"
#include "kernels/cuda/sm90/decode/config.cuh"
#include "kernels/cuda/sm90/decode/load.cuh"

namespace fovea::kernels::cuda {

template <class C>
struct Accumulator {
  float out[C::kHeadDimV / 16][C::kColumns][4] = {};
  float most[C::kColumns][2];      // largest score so far, in units of log2
  float sum[C::kColumns][2] = {};  // sum of weights over this lane's keys
  float v_unit = 0;                // fp8 scales of V are applied relative to this
  __device__ Accumulator() {
#pragma unroll
    for (auto& pair : most) pair[0] = pair[1] = -infinity();
  }
};

// Calls visit(score, key of the tile, query row of the tile).
template <class C, typename Visit>
__device__ void for_each_score(float (&scores)[C::kTile / 16][C::kColumns][4], Visit visit) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < C::kTile / 16; ++m) {
#pragma unroll
    for (int n = 0; n < C::kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        visit(scores[m][n][i], m * 16 + lane / 4 + i / 2 * 8, n * 8 + lane % 4 * 2 + i % 2);
      }
    }
  }
}

template <class C>
__device__ void modify_scores(const DecodeParams& params, const Tile& tile, int head, int first,
                              float (&scores)[C::kTile / 16][C::kColumns][4]) {
  const MaskParams& mask = params.batch.mask;
  for_each_score<C>(scores, [&](float& score, int key, int row) {
    modify_score(params, score, [&](ScorePlace& place) {
      if (row >= tile.rows) return false;
      place.distance = key_position(mask, tile.view, first + key) -
                       query_position(mask, tile.view, tile.token_of(row));
      place.slope = slope_of(params, tile.q_head_of(head, row));
      return true;
    });
  });
}

template <class C>
__device__ void mask_scores(const DecodeParams& params, const Tile& tile, int first, bool predicate,
                            float (&scores)[C::kTile / 16][C::kColumns][4]) {
  const MaskParams& mask = params.batch.mask;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < C::kColumns; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = n * 8 + lane % 4 * 2 + i;
      const int token = tile.token_of(row);
      Interval keys = {0, 0};
      if (row < tile.rows) keys = visible_keys(mask, tile.view, token, token);
      keys.begin = max(keys.begin, tile.item.key_begin);
      keys.end = min(keys.end, tile.item.key_end);
#pragma unroll
      for (int m = 0; m < C::kTile / 16; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = first + m * 16 + lane / 4 + half * 8;
          bool seen = key >= keys.begin && key < keys.end;
          if (predicate && seen) seen = visible(mask, tile.view, token, key);
          if (!seen) scores[m][n][2 * half + i] = -infinity();
        }
      }
    }
  }
}

// Turns scores into weights relative to the running maximum, and rescales earlier sums.
template <class C>
__device__ void softmax_tile(Accumulator<C>& acc, float v_rescale,
                             float (&scores)[C::kTile / 16][C::kColumns][4]) {
  float factors[C::kColumns][2];
  bool changed = false;
#pragma unroll
  for (int n = 0; n < C::kColumns; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = acc.most[n][i];
#pragma unroll
      for (int m = 0; m < C::kTile / 16; ++m) {
        most = fmaxf(most, fmaxf(scores[m][n][i], scores[m][n][2 + i]));
      }
      // Eight lanes, four apart, share a query row.
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 4));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 16));
      // A row that has seen no key keeps -inf; it subtracts 0, so that inf - inf does not occur.
      const float base = most == -infinity() ? 0.0f : most;
      const float rescale = exp2_fast(acc.most[n][i] - base);
      acc.most[n][i] = most;
      float total = 0;
#pragma unroll
      for (int m = 0; m < C::kTile / 16; ++m) {
        scores[m][n][i] = exp2_fast(scores[m][n][i] - base);
        scores[m][n][2 + i] = exp2_fast(scores[m][n][2 + i] - base);
        total += scores[m][n][i] + scores[m][n][2 + i];
      }
      acc.sum[n][i] = acc.sum[n][i] * rescale + total;
      factors[n][i] = rescale * v_rescale;
      changed = changed || factors[n][i] != 1;
    }
  }
  if (!__any_sync(~0u, changed)) return;  // usual
#pragma unroll
  for (int n = 0; n < C::kColumns; ++n) {
#pragma unroll
    for (int d = 0; d < C::kHeadDimV / 16; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc.out[d][n][i] *= factors[n][i % 2];
    }
  }
}

}  // namespace fovea::kernels::cuda
