// SPDX-License-Identifier: Apache-2.0
// From the scores of a key tile to weights in shared memory: masks, running maxima and sums.
#pragma once

#include "kernels/cuda/common/log2.cuh"
#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/sm90/mla_decode/config.cuh"

namespace fovea::kernels::cuda {

// The running maximum that weights refer to lags behind the true one by up to this many powers of
// two, so that accumulated values are rescaled seldom. Weights then reach 256, sums 256 times the
// keys.
constexpr float kMaximumLag = 8;

struct ScoreRow {
  float most;  // the maximum that weights refer to, in powers of two
  float sum;   // of this thread's columns
};

__device__ __forceinline__ int thread_row(int half) {
  return threadIdx.x % kWarpgroupThreads / 32 * 16 + threadIdx.x % 32 / 4 + half * 8;
}

// The lowest n bits, n from below 0 to beyond 64.
__device__ __forceinline__ uint64_t low_bits(int n) {
  return n >= 64 ? ~0ull : (1ull << max(n, 0)) - 1;
}

// Bit i: whether row `row` of the block sees key i of the tile before the last `left`.
__device__ __forceinline__ uint64_t seen_keys(const MlaDecodeParams& params, const RowTile& tile,
                                              int left, int row) {
  const int key = tile.item.key_begin + (tile.tiles - 1 - left) * kTileKeys;
  const MaskParams& mask = params.batch.mask;
  const int packed = tile.first_row + min(row, max(tile.rows - 1, 0));
  const int token = packed / params.q_heads;
  const int end = min(tile.item.key_end, visible_keys(mask, tile.view, token, token).end);
  uint64_t seen = low_bits(end - key);
  if (mask.tree && token < tile.view.q_len) {
    const uint64_t tree = mask.tree[tile.view.q_begin + token];
    const int first = tile.view.prefix() - key;  // draft, from the tile's first key
    if (first > -64 && first < 64) {
      seen &= first < 0 ? tree >> -first : tree << first | low_bits(first);
    } else if (first < 0) {
      seen = 0;
    }
  }
  return seen;
}

// Hides keys of the tile before the last `left` from rows that do not see them.
template <class C>
__device__ __forceinline__ void hide_keys(const MlaDecodeParams& params, const RowTile& tile,
                                          int left, float (&scores)[kTileKeys / 2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint64_t seen = seen_keys(params, tile, left, thread_row(half)) >> threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kTileKeys / 8; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (!(seen >> (i * 8 + c) & 1)) scores[4 * i + 2 * half + c] = -infinity();
      }
    }
  }
}

// Scores below any real one, yet finite: differences of two are no NaN.
constexpr float kLowest = -1e30f;

// Turns scores into weights. Returns whether some row of the warp moved its maximum; then rescale
// is what accumulated values are to be multiplied by.
__device__ __forceinline__ bool softmax(float factor, ScoreRow (&rows)[2],
                                        float (&scores)[kTileKeys / 2], float (&rescale)[2]) {
  float most[2] = {-infinity(), -infinity()};
#pragma unroll
  for (int i = 0; i < kTileKeys / 8; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      most[half] = fmaxf(most[half], fmaxf(scores[4 * i + 2 * half], scores[4 * i + 2 * half + 1]));
    }
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      most[half] = fmaxf(most[half], __shfl_xor_sync(~0u, most[half], step));
    }
  }
  const bool moved = __any_sync(~0u, most[0] * factor > rows[0].most + kMaximumLag ||
                                         most[1] * factor > rows[1].most + kMaximumLag);
  if (moved) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float next = most[half] * factor > rows[half].most + kMaximumLag ? most[half] * factor
                                                                             : rows[half].most;
      rescale[half] = exp2_fast(rows[half].most - next);
      rows[half].most = next;
      rows[half].sum *= rescale[half];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kTileKeys / 8; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& score = scores[4 * i + 2 * half + c];
        score = exp2_fast(fmaf(score, factor, -rows[half].most));
        sum += score;
      }
    }
    rows[half].sum += sum;
  }
  return moved;
}

// Four groups of weights, of 16 keys each; weights(i): two neighbouring ones of group i / 4.
template <class C, typename Weights>
__device__ __forceinline__ void store_weights(uint16_t (&to)[kTileRows][kTileColumns],
                                              Weights weights) {
  // Addresses kept over the loop would not fit beside a converting producer's registers.
  const uint32_t thread = C::kFp8 ? opaque(threadIdx.x) : threadIdx.x;
  const int lane = thread % 32;
  const int row = thread % kWarpgroupThreads / 32 * 16 + lane % 16;
#pragma unroll
  for (int pair = 0; pair < kTileKeys / 16; ++pair) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = weights(4 * pair + i);
    const int chunk = (2 * pair + lane / 16) ^ (row % 8);
    store_matrices(&to[row][chunk * 8], words);
  }
}

// The maxima of rows with `above` in one of their four lanes move up to the true ones.
__device__ __forceinline__ void raise_maxima(float factor, const bool (&above)[2],
                                             const float (&scores)[kTileKeys / 2],
                                             ScoreRow (&rows)[2], float (&rescale)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float most = -infinity();
#pragma unroll
    for (int i = 0; i < kTileKeys / 8; ++i) {
      most = fmaxf(most, fmaxf(scores[4 * i + 2 * half], scores[4 * i + 2 * half + 1]));
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const uint32_t lanes = __ballot_sync(~0u, above[half]) >> (threadIdx.x % 32 / 4 * 4);
    const float next = lanes & 0xf ? fmaxf(most * factor, rows[half].most) : rows[half].most;
    rescale[half] = exp2_fast(rows[half].most - next);
    rows[half].most = next;
    rows[half].sum *= rescale[half];
  }
}

// softmax() and store_weights() at once, without a look at the scores' own maxima where those of
// earlier tiles will do: till a thread's 16 weights of a row sum up to more than 2^kMaximumLag.
// Over fp8 caches 3 % faster; over 16-bit ones 1 % slower, for products leave the exponentials no
// time before the maxima would be known (2026-11-22).
template <class C>
__device__ __forceinline__ bool weigh_unseen(float factor, bool first, ScoreRow (&rows)[2],
                                             const float (&scores)[kTileKeys / 2],
                                             uint16_t (&to)[kTileRows][kTileColumns],
                                             float (&rescale)[2]) {
  constexpr float kMostSum = 1 << static_cast<int>(kMaximumLag);
  bool above[2] = {first, first};
  bool moved = false;
  bool again = first;
  float sums[2];
  do {
    if (again) {
      raise_maxima(factor, above, scores, rows, rescale);
      moved = true;
    }
    sums[0] = sums[1] = 0;
    store_weights<C>(to, [&](int i) {
      const int half = i % 2;
      const float low = exp2_fast(fmaf(scores[2 * i], factor, -rows[half].most));
      const float high = exp2_fast(fmaf(scores[2 * i + 1], factor, -rows[half].most));
      sums[half] += low;
      sums[half] += high;
      return pack<C::kMath>(low, high);
    });
    above[0] = sums[0] > kMostSum;
    above[1] = sums[1] > kMostSum;
    again = !moved && __any_sync(~0u, above[0] || above[1]);
  } while (again);
  rows[0].sum += sums[0];
  rows[1].sum += sums[1];
  return moved;
}

}  // namespace fovea::kernels::cuda
