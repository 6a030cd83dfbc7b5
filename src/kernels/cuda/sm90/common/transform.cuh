// SPDX-License-Identifier: Apache-2.0
// Soft caps and ALiBi: from landed products to scores for the softmax, in place.
#pragma once

#include "kernels/cuda/common/near_cap.cuh"
#include "kernels/cuda/sm90/common/hide_keys.cuh"
#include "kernels/cuda/sm90/common/row_tile.cuh"

namespace fovea::kernels::cuda {

// Scores that are changed at a time.
constexpr int kAtOnce = 8;

// Applies a rare change to every score, kAtOnce at a time, by a loop of few instructions through
// local memory: change(first, scores) for the scores from `first` on. Widened fp8 keys need the
// other form: ptxas 13.0 gave away the register of the stack's address in their largest variant.
template <class Config, typename Change>
__device__ __forceinline__ void change_scores(Accumulators<Config>& acc, Change change) {
  constexpr int kScores = Config::kKeys / 2;
  float chunk[kAtOnce];
  if constexpr (Config::kWiden) {
#pragma unroll
    for (int first = 0; first < kScores; first += kAtOnce) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) chunk[i] = acc.scores[first + i];
      change(first, chunk);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) acc.scores[first + i] = chunk[i];
    }
    return;
  }
  alignas(16) float scores[kScores];
#pragma unroll
  for (int i = 0; i < kScores; ++i) scores[i] = acc.scores[i];
#pragma unroll 1
  for (int first = 0; first < kScores; first += kAtOnce) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) chunk[i] = scores[first + i];
    change(first, chunk);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) scores[first + i] = chunk[i];
  }
#pragma unroll
  for (int i = 0; i < kScores; ++i) acc.scores[i] = scores[i];
}

// Factors of the thread's rows that come before a transform.
struct InnerFactors {
  float rows[2];
};
template <class Config>
__device__ __forceinline__ InnerFactors inner_factors(const PrefillParams& params,
                                                      const RowTile& tile) {
  if constexpr (Config::kFp8) return {tile.inner[0], tile.inner[1]};
  const float both = score_units<Config>(params, opaque(params.attention.scale)).inner;
  return {both, both};
}

// Turns products into the inner scores of a cap. Returns whether all of the warp's are near enough
// for the polynomial: none has the bit of 2 or more.
template <class Config>
__device__ __forceinline__ bool find_inner_scores(const PrefillParams& params, const RowTile& tile,
                                                  Accumulators<Config>& acc) {
  static_assert(kNearInner == 2);
  const InnerFactors factors = inner_factors<Config>(params, tile);
  uint32_t bits[2] = {};
#pragma unroll
  for (int i = 0; i < Config::kKeys / 2; ++i) {
    acc.scores[i] = __fmul_rn(acc.scores[i], factors.rows[i / 2 % 2]);
    bits[i / 2 % 2] |= __float_as_uint(acc.scores[i]);
  }
  return !uniform(((bits[0] | bits[1]) & 0x40000000) != 0);
}

// Calls visit(first, scores) for each kAtOnce capped scores of inner scores that are near.
template <class Config, typename Visit>
__device__ __forceinline__ void for_each_near(const PrefillParams& params,
                                              const Accumulators<Config>& acc, Visit visit) {
#pragma unroll
  for (int first = 0; first < Config::kKeys / 2; first += kAtOnce) {
    float inner[kAtOnce], scores[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) inner[i] = acc.scores[first + i];
    cap_near(params.cap, inner, scores);
    visit(first, scores);
  }
}

// Turns inner scores into capped scores. `near`: all of them are near.
template <class Config>
__device__ __forceinline__ void cap_scores(const PrefillParams& params, bool near,
                                           Accumulators<Config>& acc) {
  if (near) {
    for_each_near<Config>(params, acc, [&](int first, const float(&scores)[kAtOnce]) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) acc.scores[first + i] = scores[i];
    });
    return;
  }
  const float outer = cap_of(params.attention);
  change_scores<Config>(acc, [&](int, float(&scores)[kAtOnce]) {
    float nearby[kAtOnce], far[kAtOnce];
    cap_near(params.cap, scores, nearby);
    // Opaque, so that there are no branches.
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) far[i] = opaque(cap_far(scores[i], outer));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      scores[i] = fabsf(scores[i]) < kNearInner ? nearby[i] : far[i];
    }
  });
}

// Finds the slopes of a row tile. Its chain of loads would hold up key tiles.
template <class Config>
__device__ __forceinline__ void find_slopes(const PrefillParams& params, int consumer,
                                            RowTile& tile) {
  if (!Config::kTransforms || !params.attention.alibi_slopes) return;
  const WorkTile& work = tile.slot->work;
  const RequestView view = {work.request, work.q_begin, work.q_len, work.kv_len};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = thread_row(half);
    const int token = min(row_token(params, work, consumer, row), work.q_len - 1);
    tile.slope[half] = slope_of(params.attention, row_head(params, work, row));
    tile.position[half] = query_position(params.attention.batch.mask, view, token);
  }
}

// Adds slope * (key - query) to scores that are in units of log2 when multiplied by `unit`.
template <class Config>
__device__ __forceinline__ void add_slopes(const PrefillParams& params, const RowTile& tile,
                                           int consumer, int block, const float (&unit)[2],
                                           Accumulators<Config>& acc) {
  const MaskParams& mask = params.attention.batch.mask;
  const WorkTile& work = tile.slot->work;
  const RequestView view = {work.request, work.q_begin, work.q_len, work.kv_len};
  RowTile rows = tile;
  if constexpr (Config::kCaps) find_slopes<Config>(params, consumer, rows);
  const int first = block * Config::kKeys + opaque(static_cast<int>(threadIdx.x % 4 * 2));
  const float distance[2] = {static_cast<float>(first - rows.position[0]),
                             static_cast<float>(first - rows.position[1])};
#pragma unroll
  for (int i = 0; i < Config::kKeys / 2; i += 2) {
    const int half = i / 2 % 2;
    // Each distance has its own product: a sum over the tile's distances would lose bits of far
    // ones.
    const float even = rows.slope[half] * (distance[half] + static_cast<float>(i / 4 * 8));
    acc.scores[i] = __fmaf_rn(acc.scores[i], unit[half], even);
    acc.scores[i + 1] = __fmaf_rn(acc.scores[i + 1], unit[half], even + rows.slope[half]);
  }
  // New keys may stand at other positions.
  if (uniform(mask.positions && (block + 1) * Config::kKeys > view.prefix())) {
    change_scores<Config>(acc, [&](int from, float(&scores)[kAtOnce]) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int key = first + (from + i) / 4 * 8 + i % 2;
        const float moved = static_cast<float>(key_position(mask, view, key) - key);
        scores[i] = __fmaf_rn(rows.slope[i / 2 % 2], moved, scores[i]);
      }
    });
  }
}

// Transforms landed products. kDefers: near inner scores are left to the softmax if nothing else
// follows; returns whether they are.
template <class Config, bool kDefers>
__device__ __forceinline__ bool transform_scores(const PrefillParams& params, const RowTile& tile,
                                                 int consumer, int block,
                                                 Accumulators<Config>& acc) {
  if constexpr (!Config::kTransforms) return false;
  const AttentionParams& attention = params.attention;
  const bool capped = Config::kCaps && uniform(attention.logit_cap > 0);
  if (capped) {
    const bool near = find_inner_scores<Config>(params, tile, acc);
    if (kDefers && uniform(near && tile.bounded && is_open<Config>(tile, block))) return true;
    cap_scores<Config>(params, near, acc);
  }
  if (uniform(attention.alibi_slopes != nullptr)) {
    InnerFactors unit = {1, 1};
    if (!capped) unit = inner_factors<Config>(params, tile);
    add_slopes<Config>(params, tile, consumer, block, unit.rows, acc);
  }
  return false;
}

}  // namespace fovea::kernels::cuda
