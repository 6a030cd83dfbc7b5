// SPDX-License-Identifier: Apache-2.0
// From the scores of a key tile to weights in shared memory. Keys are rows of the scores.
#pragma once

#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/sm90/mla_common/masks.cuh"
#include "kernels/cuda/sm90/mla_decode_fp8_narrow/config.cuh"

namespace fovea::kernels::cuda {

// Hides keys of the tile that `left` tiles follow from query rows that do not see them.
template <class C>
__device__ __forceinline__ void hide_keys(const MlaDecodeParams& params, const RowTile& tile,
                                          int left, float (&scores)[C::kRows / 2]) {
#pragma unroll
  for (int i = 0; i < C::kRows / 4; ++i) {
    const uint64_t seen = seen_keys(params, tile, left, column_of(i));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!(seen >> thread_row(half) & 1)) scores[score_of(i, half)] = -infinity();
    }
  }
}

// Stores the weights of a key tile: those of a query row are a row of shared memory.
template <class C>
__device__ __forceinline__ void store_weights(uint16_t (&to)[C::kRows][kTileColumns],
                                              const float (&scores)[C::kRows / 2]) {
  const int lane = threadIdx.x % 32;
  const int chunk = threadIdx.x % kWarpgroupThreads / 32 * 2 + lane / 8 % 2;
#pragma unroll
  for (int pair = 0; pair < C::kRows / 16; ++pair) {
    const float* s = scores + 8 * pair;
    const int row = 16 * pair + lane / 16 * 8 + lane % 8;
    const uint32_t words[4] = {pack<C::kMath>(s[0], s[1]), pack<C::kMath>(s[2], s[3]),
                               pack<C::kMath>(s[4], s[5]), pack<C::kMath>(s[6], s[7])};
    store_matrices_transposed(&to[row][(chunk ^ row % 8) * 8], words);
  }
}

// Turns the scores of a key tile into weights and rescales the sums if a maximum moved. `largest`
// is of this warp's keys, `maxima` of each warp's.
template <class C>
__device__ __forceinline__ void weigh_columns(const float (&maxima)[4][C::kRows], float factor,
                                              float (&largest)[C::kRows / 4],
                                              float (&scores)[C::kRows / 2], Sums<C>& sums) {
  float rescale[C::kRows / 4];
  bool moved = false;
#pragma unroll
  for (int i = 0; i < C::kRows / 4; ++i) {
#pragma unroll
    for (int w = 0; w < 4; ++w) largest[i] = fmaxf(largest[i], maxima[w][column_of(i)]);
    const bool moves = largest[i] * factor > sums.max[i] + kMaximumLag;
    const float next = moves ? largest[i] * factor : sums.max[i];
    rescale[i] = exp2_fast(sums.max[i] - next);
    sums.max[i] = next;
    moved |= moves;
  }
  if (__any_sync(~0u, moved)) {
#pragma unroll
    for (int i = 0; i < C::kRows / 4; ++i) sums.sum[i] *= rescale[i];
#pragma unroll
    for (auto& tile : sums.out) {
#pragma unroll
      for (int i = 0; i < C::kRows / 2; ++i) tile[i] *= rescale[i / 4 * 2 + i % 2];
    }
  }
#pragma unroll
  for (int i = 0; i < C::kRows / 4; ++i) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float& score = scores[score_of(i, row)];
      score = exp2_fast(fmaf(score, factor, -sums.max[i]));
      sums.sum[i] += score;
    }
  }
}

}  // namespace fovea::kernels::cuda
