// SPDX-License-Identifier: Apache-2.0
// Soft cap and ALiBi: from landed products to scores that the softmax takes, in place.
#pragma once

#include "kernels/cuda/common/near_cap.cuh"
#include "kernels/cuda/sm90/prefill/scores.cuh"

namespace fovea::kernels::cuda {

// A rare change of every score, one after the other: a loop of few instructions, through local
// memory. Not where fp8 keys are widened: ptxas 13.0 gave the register of the stack's address to
// something else in their largest variant.
template <class Config, typename Change>
__device__ __forceinline__ void change_scores(Accumulators<Config>& acc, Change change) {
  if constexpr (Config::kWiden) {
#pragma unroll
    for (int i = 0; i < Config::kKeys / 2; ++i) acc.scores[i] = change(i, acc.scores[i]);
    return;
  }
  float scores[Config::kKeys / 2];
#pragma unroll
  for (int i = 0; i < Config::kKeys / 2; ++i) scores[i] = acc.scores[i];
#pragma unroll 8
  for (int i = 0; i < Config::kKeys / 2; ++i) scores[i] = change(i, scores[i]);
#pragma unroll
  for (int i = 0; i < Config::kKeys / 2; ++i) acc.scores[i] = scores[i];
}

// What products of the thread's rows are multiplied with first, if they are transformed.
struct InnerFactors {
  float rows[2];
};
template <class Config>
__device__ __forceinline__ InnerFactors inner_factors(const PrefillParams& params,
                                                      const RowTile& tile) {
  if constexpr (Config::kFp8) return {tile.inner[0], tile.inner[1]};
  const float both = score_units<Config>(params.attention, opaque(params.attention.scale)).inner;
  return {both, both};
}

// Scores become `outer` * tanh(inner * product).
template <class Config>
__device__ __forceinline__ void cap_scores(const PrefillParams& params, const RowTile& tile,
                                           float outer, Accumulators<Config>& acc) {
  const InnerFactors factors = inner_factors<Config>(params, tile);
  const float(&inner)[2] = factors.rows;
  float most[2] = {};
#pragma unroll
  for (int i = 0; i < Config::kKeys / 2; ++i)
    most[i / 2 % 2] = fmaxf(most[i / 2 % 2], fabsf(acc.scores[i]));
  if (uniform(most[0] * inner[0] > kNearTanh || most[1] * inner[1] > kNearTanh)) {
    change_scores<Config>(acc, [&](int i, float score) {
      const float factor = i / 2 % 2 ? inner[1] : inner[0];
      return fabsf(score) * factor > kNearTanh ? outer * tanh_fast(score * factor)
                                               : near_cap(factor, outer)(score);
    });
  } else {
    const NearCap cap[2] = {near_cap(inner[0], outer), near_cap(inner[1], outer)};
#pragma unroll
    for (int i = 0; i < Config::kKeys / 2; ++i) acc.scores[i] = cap[i / 2 % 2](acc.scores[i]);
  }
}

// Slopes of the thread's rows and where their tokens stand.
struct RowSlopes {
  float slope[2];  // in units of log2
  int position[2];
};
__device__ __forceinline__ RowSlopes row_slopes(const PrefillParams& params, const RowTile& tile,
                                                int consumer) {
  const WorkTile& work = tile.slot->work;
  const RequestView view = {work.request, work.q_begin, work.q_len, work.kv_len};
  RowSlopes rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = opaque(thread_row(half));
    const int token = min(row_token(params, work, consumer, row), work.q_len - 1);
    rows.slope[half] = params.attention.alibi_slopes[row_head(params, work, row)] * kLog2E;
    rows.position[half] = query_position(params.attention.batch.mask, view, token);
  }
  return rows;
}

// Scores, in units of log2 when multiplied by `unit`, plus slope * (key - query).
template <class Config>
__device__ __forceinline__ void add_slopes(const PrefillParams& params, const RowTile& tile,
                                           int consumer, int block, const float (&unit)[2],
                                           Accumulators<Config>& acc) {
  const MaskParams& mask = params.attention.batch.mask;
  const WorkTile& work = tile.slot->work;
  const RequestView view = {work.request, work.q_begin, work.q_len, work.kv_len};
  const RowSlopes rows = row_slopes(params, tile, consumer);
  const int first = block * Config::kKeys + opaque(static_cast<int>(threadIdx.x % 4 * 2));
  const float distance[2] = {static_cast<float>(first - rows.position[0]),
                             static_cast<float>(first - rows.position[1])};
#pragma unroll
  for (int i = 0; i < Config::kKeys / 2; i += 2) {
    const int half = i / 2 % 2;
    // A product each: sums of a tile's distances would lose what far ones have more of.
    const float even = rows.slope[half] * (distance[half] + static_cast<float>(i / 4 * 8));
    acc.scores[i] = __fmaf_rn(acc.scores[i], unit[half], even);
    acc.scores[i + 1] = __fmaf_rn(acc.scores[i + 1], unit[half], even + rows.slope[half]);
  }
  // New keys may stand elsewhere.
  if (uniform(mask.positions && (block + 1) * Config::kKeys > view.prefix())) {
    change_scores<Config>(acc, [&](int i, float score) {
      const int key = first + i / 4 * 8 + i % 2;
      const float moved = static_cast<float>(key_position(mask, view, key) - key);
      return __fmaf_rn(i / 2 % 2 ? rows.slope[1] : rows.slope[0], moved, score);
    });
  }
}

template <class Config>
__device__ __forceinline__ void transform_scores(const PrefillParams& params, const RowTile& tile,
                                                 int consumer, int block,
                                                 Accumulators<Config>& acc) {
  if constexpr (!Config::kGeneral) return;
  const AttentionParams& attention = params.attention;
  const bool capped = uniform(attention.logit_cap > 0);
  if (capped) cap_scores<Config>(params, tile, attention.logit_cap * kLog2E, acc);
  if (uniform(attention.alibi_slopes != nullptr)) {
    InnerFactors unit = {1, 1};
    if (!capped) unit = inner_factors<Config>(params, tile);
    add_slopes<Config>(params, tile, consumer, block, unit.rows, acc);
  }
}

}  // namespace fovea::kernels::cuda
