// SPDX-License-Identifier: Apache-2.0
// From the scores of a key tile to weights in shared memory: masks, running maxima and sums.
#pragma once

#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/sm90/mla_common/masks.cuh"
#include "kernels/cuda/sm90/mla_decode/config.cuh"

namespace fovea::kernels::cuda {

// The online softmax of one of a thread's two rows.
struct ScoreRow {
  float max;  // the maximum that weights refer to, as a power of two
  float sum;  // sum of the weights of this thread's columns
};

__device__ __forceinline__ float row_lse(const ScoreRow& row) {
  return row.sum > 0 ? (row.max + log2f(row.sum)) * kLn2 : -infinity();
}

// Hides keys of the tile that `left` tiles follow from rows that do not see them.
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

// Turns scores into weights. Returns whether the maximum of some row of the warp moved; `rescale`
// then holds the factors of the accumulated values.
__device__ __forceinline__ bool softmax(float factor, ScoreRow (&rows)[2],
                                        float (&scores)[kTileKeys / 2], float (&rescale)[2]) {
  float largest[2] = {-infinity(), -infinity()};
#pragma unroll
  for (int i = 0; i < kTileKeys / 8; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] =
          fmaxf(largest[half], fmaxf(scores[4 * i + 2 * half], scores[4 * i + 2 * half + 1]));
    }
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], step));
    }
  }
  const bool moved = __any_sync(~0u, largest[0] * factor > rows[0].max + kMaximumLag ||
                                         largest[1] * factor > rows[1].max + kMaximumLag);
  if (moved) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float next = largest[half] * factor > rows[half].max + kMaximumLag
                             ? largest[half] * factor
                             : rows[half].max;
      rescale[half] = exp2_fast(rows[half].max - next);
      rows[half].max = next;
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
        score = exp2_fast(fmaf(score, factor, -rows[half].max));
        sum += score;
      }
    }
    rows[half].sum += sum;
  }
  return moved;
}

// Stores weights in four groups of 16 keys; weights(i) packs two neighbouring ones of group i / 4.
template <class C, typename Weights>
__device__ __forceinline__ void store_weights(uint16_t (&to)[kTileRows][kTileColumns],
                                              Weights weights) {
  // Over fp8 caches the registers do not hold these addresses over the loop.
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

// Raises the maxima of rows with `above` in one of their four lanes to the true ones.
__device__ __forceinline__ void raise_maxima(float factor, const bool (&above)[2],
                                             const float (&scores)[kTileKeys / 2],
                                             ScoreRow (&rows)[2], float (&rescale)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = -infinity();
#pragma unroll
    for (int i = 0; i < kTileKeys / 8; ++i) {
      largest = fmaxf(largest, fmaxf(scores[4 * i + 2 * half], scores[4 * i + 2 * half + 1]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const uint32_t lanes = __ballot_sync(~0u, above[half]) >> (threadIdx.x % 32 / 4 * 4);
    const float next = lanes & 0xf ? fmaxf(largest * factor, rows[half].max) : rows[half].max;
    rescale[half] = exp2_fast(rows[half].max - next);
    rows[half].max = next;
    rows[half].sum *= rescale[half];
  }
}

// Does softmax() and store_weights() at once. It takes the maxima of earlier tiles without looking
// at the scores, and repeats with raised ones if a thread's 16 weights of a row sum to more than
// 2^kMaximumLag. Faster over fp8 caches alone: over 16-bit ones the products leave no time for the
// exponentials before the maxima would be known.
template <class C>
__device__ __forceinline__ bool weigh_optimistically(float factor, bool first, ScoreRow (&rows)[2],
                                                     const float (&scores)[kTileKeys / 2],
                                                     uint16_t (&to)[kTileRows][kTileColumns],
                                                     float (&rescale)[2]) {
  constexpr float kMaxSum = 1 << static_cast<int>(kMaximumLag);
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
      const float low = exp2_fast(fmaf(scores[2 * i], factor, -rows[half].max));
      const float high = exp2_fast(fmaf(scores[2 * i + 1], factor, -rows[half].max));
      sums[half] += low;
      sums[half] += high;
      return pack<C::kMath>(low, high);
    });
    above[0] = sums[0] > kMaxSum;
    above[1] = sums[1] > kMaxSum;
    again = !moved && __any_sync(~0u, above[0] || above[1]);
  } while (again);
  rows[0].sum += sums[0];
  rows[1].sum += sums[1];
  return moved;
}

}  // namespace fovea::kernels::cuda
