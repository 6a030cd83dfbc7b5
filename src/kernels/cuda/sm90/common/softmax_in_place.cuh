// SPDX-License-Identifier: Apache-2.0
// The softmax of a key tile in place of its scores, while the values of the previous key tile are
// still being multiplied: packed weights would have to wait for those that the products read.
#pragma once

#include "kernels/cuda/sm90/common/softmax.cuh"

namespace fovea::kernels::cuda {

__device__ __forceinline__ float weight_of(float score, float factor, float base) {
  return exp2_fast(__fmaf_rn(score, factor, -base));
}

// Finds the scores of a key tile again for the warp's rows that have outgrown their base: weights
// may have overflowed in their place. It uses products of the warp, through local memory: others
// would make the compiler serialise the warpgroup's or spill. This is rare, and slow. With masks it
// finds those of all rows, and the other rows get the same weights again.
template <class Config>
__device__ __forceinline__ void score_again(const PrefillParams& params,
                                            typename Config::SharedMemory& shared,
                                            const RowTile& tile, int consumer, int block, int stage,
                                            const bool (&rows)[2], Accumulators<Config>& acc) {
  const int lane = threadIdx.x % 32;
  const int key = lane / 16 * 8 + lane % 8;
  const int column = block * Config::kKeys + lane % 4 * 2;
  Interval seen[2];
#pragma unroll
  for (int half = 0; half < 2 && !Config::kMasked; ++half) {
    seen[half] = row_keys<Config>(params, *tile.slot, consumer, thread_row(half));
  }
  float again[Config::kKeys / 2];
#pragma unroll 1
  for (int first = 0; first < Config::kKeys; first += 16) {
    float scores[2][4] = {};
#pragma unroll
    for (int step = 0; step < Config::kHeadDim / 16; ++step) {
      uint32_t q[4];
      if (step < Config::kQueryRegisterSteps) {
#pragma unroll
        for (int i = 0; i < 4; ++i) q[i] = acc.queries[4 * step + i];
      } else {
        load_query_step<Config>(shared, consumer, 0, step, q);  // there is one stage
      }
      const int chunk = (step % 4 * 2 + lane / 8 % 2) ^ key % 8;
      uint32_t k[4];
      load_matrices(k, &shared.k[stage][step / 4][first + key][chunk * 8]);
      multiply_add<Config::kMath>(scores[0], q, k[0], k[1]);
      multiply_add<Config::kMath>(scores[1], q, k[2], k[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = column + first + i / 4 * 8 + i % 2;
      const Interval& keys = seen[i / 2 % 2];
      const bool visible = Config::kMasked || (at >= keys.begin && at < keys.end);
      again[first / 2 + i] = visible ? scores[i / 4][i % 4] : -infinity();
    }
  }
#pragma unroll
  for (int i = 0; i < Config::kKeys / 2; ++i) {
    if (Config::kMasked || rows[i / 2 % 2]) acc.scores[i] = again[i];
  }
  if constexpr (Config::kMasked) {
    transform_scores<Config, false>(params, tile, consumer, block, acc);
    mask_scores<Config>(params, shared, tile, consumer, block, acc);
  }
}

// Sums of the thread's weights, which lie in place of the scores, and whether the warp's rows keep
// their base.
struct WeightSums {
  float rows[2];
  bool outgrown[2];
  bool keep;
};
template <class Config>
__device__ __forceinline__ WeightSums sum_weights(const RowTile& tile,
                                                  const Accumulators<Config>& acc) {
  float total[2][2] = {};
#pragma unroll
  for (int i = 0; i < Config::kKeys / 2; ++i) total[i / 2 % 2][i % 2] += acc.scores[i];
  WeightSums sums;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sums.rows[half] = total[half][0] + total[half][1];
    sums.outgrown[half] = has_outgrown<Config>(tile, sums.rows[half]);
  }
  sums.keep = !uniform(sums.outgrown[0] || sums.outgrown[1]);
  return sums;
}

// Replaces inner scores by the weights of their capped scores; powers of some run under the
// polynomials of others.
template <class Config>
__device__ __forceinline__ void weigh_capped(const PrefillParams& params,
                                             Accumulators<Config>& acc) {
  float total[2][2] = {};
  for_each_near<Config>(params, acc, [&](int first, const float(&scores)[kAtOnce]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      acc.scores[first + i] = exp2_fast(scores[i]);
      total[i / 2 % 2][i % 2] += acc.scores[first + i];
    }
  });
#pragma unroll
  for (int half = 0; half < 2; ++half) acc.sum[half] += total[half][0] + total[half][1];
}

// Replaces scores by weights. Returns false if rows of the warp have outgrown their base, so that
// the weights are void. kSecond: it is a row tile's second key tile, the first one that rows see
// which end before the last key tile. `inner`: scores are still to be capped.
template <class Config, bool kSecond>
__device__ __forceinline__ bool softmax_in_place(const PrefillParams& params, const RowTile& tile,
                                                 bool inner, Accumulators<Config>& acc) {
  if (Config::kCaps && inner) {
    weigh_capped<Config>(params, acc);
    return true;
  }
  const float factor[2] = {tile.factor[0], tile.factor[1]};
  if constexpr (kSecond) {
    const bool nothing[2] = {acc.base[0] == kNothing, acc.base[1] == kNothing};
    if (uniform(nothing[0] || nothing[1])) [[unlikely]] {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float base = largest_base<Config>(half, acc.base[half], factor[half], acc);
        if (nothing[half]) acc.base[half] = base;
      }
    }
  }
  if (Config::kCaps && uniform(tile.bounded)) {
#pragma unroll
    for (int i = 0; i < Config::kKeys / 2; ++i) acc.scores[i] = exp2_fast(acc.scores[i]);
  } else {
#pragma unroll
    for (int i = 0; i < Config::kKeys / 2; ++i) {
      acc.scores[i] = weight_of(acc.scores[i], factor[i / 2 % 2], acc.base[i / 2 % 2]);
    }
  }
  const WeightSums sums = sum_weights<Config>(tile, acc);
  if (sums.keep) {
    acc.sum[0] += sums.rows[0];
    acc.sum[1] += sums.rows[1];
  }
  return sums.keep;
}

// Finds the weights of rows that have outgrown their base, relative to a higher one; out is to
// shrink by acc.rescale. `stage` still has the key tile's keys.
template <class Config>
__device__ __forceinline__ void softmax_again(const PrefillParams& params,
                                              typename Config::SharedMemory& shared,
                                              const RowTile& tile, int consumer, int block,
                                              int stage, Accumulators<Config>& acc) {
  const float factor[2] = {tile.factor[0], tile.factor[1]};
  const WeightSums void_sums = sum_weights<Config>(tile, acc);
  const bool rows[2] = {row_votes(void_sums.outgrown[0]), row_votes(void_sums.outgrown[1])};
  score_again<Config>(params, shared, tile, consumer, block, stage, rows, acc);
  raise_bases<Config>(factor, rows, acc);
#pragma unroll
  for (int i = 0; i < Config::kKeys / 2; ++i) {
    const int half = i / 2 % 2;
    if (Config::kMasked || rows[half])
      acc.scores[i] = weight_of(acc.scores[i], factor[half], acc.base[half]);
  }
  const WeightSums sums = sum_weights<Config>(tile, acc);
  acc.sum[0] += sums.rows[0];
  acc.sum[1] += sums.rows[1];
}

}  // namespace fovea::kernels::cuda
