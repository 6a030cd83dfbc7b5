// SPDX-License-Identifier: Apache-2.0
// One tile of keys: scores, masks, online softmax (arXiv:1805.02867), products with V. Each warp owns
// 16 rows; a thread holds two of them, lane / 4 and lane / 4 + 8.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/visibility.cuh"
#include "kernels/cuda/portable/attention/config.cuh"
#include "kernels/cuda/portable/attention/load.cuh"

namespace fovea::kernels::cuda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// A query row as one thread sees it.
struct QueryRow {
  bool valid;
  int token;
  int position;
  Interval keys;  // without a predicate: exactly the visible ones
  float slope;    // ALiBi, in units of log2
};

template <class Config>
struct Accumulator {
  float out[Config::kHeadDimV / 8][4] = {};
  float most[2] = {-infinity(), -infinity()};  // largest score so far, log2 units
  float sum[2] = {0, 0};
};

__device__ inline QueryRow query_row(const AttentionParams& params, const Tile& tile, int row) {
  QueryRow query = {row < tile.rows, 0, 0, {0, 0}, 0};
  if (!query.valid) return query;
  const MaskParams& mask = params.batch.mask;
  query.token = tile.token_of(row);
  query.position = query_position(mask, tile.view, query.token);
  query.keys = visible_keys(mask, tile.view, query.token, query.token);
  if (params.alibi_slopes) query.slope = params.alibi_slopes[tile.head_of(row)] * kLog2E;
  return query;
}

template <class Config>
__device__ void score_tile(const typename Config::SharedMemory& shared, int k_stage,
                           float (&scores)[Config::kKeys / 8][4]) {
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * 16;
#pragma unroll
  for (auto& tile : scores) tile[0] = tile[1] = tile[2] = tile[3] = 0;
#pragma unroll
  for (int d = 0; d < Config::kHeadDim; d += 16) {
    uint32_t q[4];
    load_matrices(q, &shared.q[warp_row + lane % 16][d + lane / 16 * 8]);
#pragma unroll
    for (int n = 0; n < Config::kKeys; n += 16) {
      uint32_t k[4];
      load_matrices(k, &shared.k[k_stage][n + lane % 8 + lane / 16 * 8][d + lane / 8 % 2 * 8]);
      multiply_add<Config::kQ>(scores[n / 8], q, k[0], k[1]);
      multiply_add<Config::kQ>(scores[n / 8 + 1], q, k[2], k[3]);
    }
  }
}

// Calls visit(score, column of the tile, which of the thread's rows).
template <class Config, typename Visit>
__device__ void for_each_score(float (&scores)[Config::kKeys / 8][4], Visit visit) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < Config::kKeys / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) visit(scores[n][i], n * 8 + lane % 4 * 2 + i % 2, i / 2);
  }
}

// Raw products to scores in log2 units: cache scale, softmax scale, cap, ALiBi.
template <class Config>
__device__ void transform_scores(const AttentionParams& params, const Tile& tile,
                                 const QueryRow (&rows)[2], const float* k_scale, int first,
                                 float (&scores)[Config::kKeys / 8][4]) {
  const float factor = params.logit_cap > 0 ? params.scale : params.scale * kLog2E;
#pragma unroll
  for (auto& score : scores) {
#pragma unroll
    for (float& value : score) value *= factor;
  }
  if (params.keys.k_scale) {
    for_each_score<Config>(scores, [&](float& score, int column, int) { score *= k_scale[column]; });
  }
  if (params.logit_cap > 0) {
    for_each_score<Config>(scores, [&](float& score, int, int) {
      score = params.logit_cap * kLog2E * tanhf(score / params.logit_cap);
    });
  }
  if (params.alibi_slopes) {
    for_each_score<Config>(scores, [&](float& score, int column, int half) {
      const int at = key_position(params.batch.mask, tile.view, first + column);
      score += rows[half].slope * static_cast<float>(at - rows[half].position);
    });
  }
}

template <class Config>
__device__ void mask_scores(const AttentionParams& params, const Tile& tile,
                            const QueryRow (&rows)[2], int first, bool predicate,
                            float (&scores)[Config::kKeys / 8][4]) {
  for_each_score<Config>(scores, [&](float& score, int column, int half) {
    const int key = first + column;
    const QueryRow& row = rows[half];
    bool seen = row.valid && key >= tile.item.key_begin && key < tile.item.key_end &&
                key >= row.keys.begin && key < row.keys.end;
    if (predicate && seen) seen = visible(params.batch.mask, tile.view, row.token, key);
    if (!seen) score = -infinity();
  });
}

// Scores to weights relative to the running maximum; rescales what was accumulated before.
template <class Config>
__device__ void softmax_tile(Accumulator<Config>& sum, float (&scores)[Config::kKeys / 8][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float most = sum.most[half];
#pragma unroll
    for (int n = 0; n < Config::kKeys / 8; ++n) {
      most = fmaxf(most, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
    }
    // Four neighbouring lanes share a row.
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    // A row that has seen nothing keeps -inf: subtract 0 so that no inf - inf arises.
    const float base = most == -infinity() ? 0.0f : most;
    const float rescale = exp2_fast(sum.most[half] - base);
    sum.most[half] = most;
    float total = 0;
#pragma unroll
    for (int n = 0; n < Config::kKeys / 8; ++n) {
      scores[n][2 * half] = exp2_fast(scores[n][2 * half] - base);
      scores[n][2 * half + 1] = exp2_fast(scores[n][2 * half + 1] - base);
      total += scores[n][2 * half] + scores[n][2 * half + 1];
    }
    sum.sum[half] = sum.sum[half] * rescale + total;
#pragma unroll
    for (int d = 0; d < Config::kHeadDimV / 8; ++d) {
      sum.out[d][2 * half] *= rescale;
      sum.out[d][2 * half + 1] *= rescale;
    }
  }
}

template <class Config>
__device__ void add_values(const AttentionParams& params,
                           const typename Config::SharedMemory& shared, int v_stage,
                           const float* v_scale, float (&weights)[Config::kKeys / 8][4],
                           Accumulator<Config>& sum) {
  const int lane = threadIdx.x % 32;
  if (Config::kConvert && params.keys.v_scale && params.keys.scale_slot_stride) {
    for_each_score<Config>(weights, [&](float& weight, int column, int) {
      weight *= v_scale[column] * Config::kScaleUnit;
    });
  }
#pragma unroll
  for (int n = 0; n < Config::kKeys / 16; ++n) {
    const uint32_t p[4] = {pack<Config::kQ>(weights[2 * n][0], weights[2 * n][1]),
                           pack<Config::kQ>(weights[2 * n][2], weights[2 * n][3]),
                           pack<Config::kQ>(weights[2 * n + 1][0], weights[2 * n + 1][1]),
                           pack<Config::kQ>(weights[2 * n + 1][2], weights[2 * n + 1][3])};
#pragma unroll
    for (int d = 0; d < Config::kHeadDimV; d += 16) {
      uint32_t v[4];
      load_matrices_transposed(v, &shared.v[v_stage][n * 16 + lane % 16][d + lane / 16 * 8]);
      multiply_add<Config::kQ>(sum.out[d / 8], p, v[0], v[1]);
      multiply_add<Config::kQ>(sum.out[d / 8 + 1], p, v[2], v[3]);
    }
  }
}

}  // namespace fovea::kernels::cuda
