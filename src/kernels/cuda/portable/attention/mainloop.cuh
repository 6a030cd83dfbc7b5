// SPDX-License-Identifier: Apache-2.0
// The work on one tile of keys: scores, masks, online softmax (arXiv:1805.02867), products with V.
// A thread has two rows of each m16 tile of its warp, lane / 4 and lane / 4 + 8.
#pragma once

#include "kernels/cuda/common/score_mod.cuh"
#include "kernels/cuda/common/visibility.cuh"
#include "kernels/cuda/portable/attention/config.cuh"
#include "kernels/cuda/portable/attention/load.cuh"

namespace fovea::kernels::cuda {

template <class Config>
struct Accumulator {
  float out[Config::kRowFragments][Config::kHeadDimV / 8][4] = {};
  float base[Config::kRowFragments][2];      // log2 of the unit of the sums; -inf: nothing seen
  float sum[Config::kRowFragments][2] = {};  // over the thread's own columns

  __device__ Accumulator() {
#pragma unroll
    for (auto& pair : base) pair[0] = pair[1] = -infinity();
  }
};

template <class Config>
using Scores = float[Config::kRowFragments][Config::kWarpKeys / 8][4];

template <class Config>
__device__ QueryRow query_row(const AttentionParams& params, const Tile& tile, int row) {
  const auto* const q = static_cast<const char*>(params.q);
  if (row >= tile.rows) return {q};
  const MaskParams& mask = params.batch.mask;
  const int token = tile.token_of(row);
  const int head = tile.head_of(row);
  const Interval keys = visible_keys(mask, tile.view, token, token);
  const float slope = params.alibi_slopes ? slope_of(params, head) : 0.0f;
  const int64_t at =
      (tile.view.q_begin + token) * params.q_token_stride + head * params.q_head_stride;
  const int position = query_position(mask, tile.view, token);
  return {q + at * type_bytes(Config::kQ), token, head, position, keys.begin, keys.end, slope};
}

// Return the first row of the thread's warp, and the warp's first key of a step of the tile.
template <class Config>
__device__ int warp_row() {
  return Config::kSplitsKeys ? 0 : threadIdx.x / 32 * 16 * Config::kRowFragments;
}
template <class Config>
__device__ int warp_key() {
  return Config::kSplitsKeys ? threadIdx.x / 32 * Config::kWarpKeys : 0;
}

template <class Config>
__device__ void score_tile(const typename Config::SharedMemory& shared, int k_stage, int step,
                           Scores<Config>& scores) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (auto& rows : scores) {
#pragma unroll
    for (auto& tile : rows) tile[0] = tile[1] = tile[2] = tile[3] = 0;
  }
#pragma unroll
  for (int d = 0; d < Config::kHeadDim; d += 16) {
    uint32_t q[Config::kRowFragments][4];
#pragma unroll
    for (int m = 0; m < Config::kRowFragments; ++m) {
      load_matrices(q[m], &shared.q[warp_row<Config>() + m * 16 + lane % 16][d + lane / 16 * 8]);
    }
#pragma unroll
    for (int n = 0; n < Config::kWarpKeys; n += 16) {
      uint32_t k[4];
      const int key = step + warp_key<Config>() + n + lane % 8 + lane / 16 * 8;
      load_matrices(k, &shared.k[k_stage][key][d + lane / 8 % 2 * 8]);
#pragma unroll
      for (int m = 0; m < Config::kRowFragments; ++m) {
        multiply_add<Config::kMath>(scores[m][n / 8], q[m], k[0], k[1]);
        multiply_add<Config::kMath>(scores[m][n / 8 + 1], q[m], k[2], k[3]);
      }
    }
  }
}

// Calls visit(score, number, column) for the thread's scores; `number` counts them, `column` is
// that of the tile.
template <class Config, typename Visit>
__device__ void for_each_score(Scores<Config>& scores, Visit visit) {
  const int column = warp_key<Config>() + threadIdx.x % 4 * 2;
#pragma unroll
  for (int m = 0; m < Config::kRowFragments; ++m) {
#pragma unroll
    for (int n = 0; n < Config::kWarpKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        visit(scores[m][n][i], (m * (Config::kWarpKeys / 8) + n) * 4 + i, column + n * 8 + i % 2);
      }
    }
  }
}

// Return the row and the column of the step of the thread's score with this number.
template <class Config>
__device__ int row_of_score(int number) {
  return warp_row<Config>() + number / (Config::kWarpKeys / 2) * 16 + threadIdx.x % 32 / 4 +
         number / 2 % 2 * 8;
}
template <class Config>
__device__ int column_of_score(int number) {
  return warp_key<Config>() + threadIdx.x % 4 * 2 + number / 4 % (Config::kWarpKeys / 8) * 8 +
         number % 2;
}

// Returns a bit for each of the thread's scores: 1 if it is hidden. Called before the scores exist,
// because it needs their registers.
template <class Config>
__device__ uint32_t hidden_scores(const AttentionParams& params, const Tile& tile,
                                  const QueryRow* queries, int first) {
  constexpr int kScores = Config::kRowFragments * Config::kWarpKeys / 2;
  static_assert(kScores <= 32);
  uint32_t hidden = 0;
  if (!needs_predicate(params.batch.mask)) {
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const QueryRow& query = queries[row_of_score<Config>(i)];
      const int from = max(tile.item.key_begin, query.first_key);
      const int keys = min(tile.item.key_end, query.end_key) - from;
      const int at = first + column_of_score<Config>(i) - from;
      hidden |= static_cast<uint32_t>(at < 0 || at >= keys) << i |
                static_cast<uint32_t>(at < -1 || at + 1 >= keys) << (i + 1);
    }
    return hidden;
  }
#pragma unroll 1
  for (int i = 0; i < kScores; ++i) {
    const QueryRow& query = queries[row_of_score<Config>(i)];
    const int key = first + column_of_score<Config>(i);
    bool seen = key >= max(tile.item.key_begin, query.first_key) &&
                key < min(tile.item.key_end, query.end_key);
    if (seen) seen = inlined_visible(params.batch.mask, tile.view, query.token, key);
    hidden |= static_cast<uint32_t>(!seen) << i;
  }
  return hidden;
}

// Returns the factor from products to natural scores if they are capped, otherwise to scores in
// units of log2.
__device__ inline float product_unit(const AttentionParams& params) {
  return params.logit_cap > 0 ? params.scale : params.scale * kLog2E;
}

// Turns products into scores: applies the scales of queries and cache, the score modifiers and the
// mask, which makes hidden scores -inf. Returns the factor from the results to units of log2; if a
// factor is all that products need, they stay unchanged.
template <class Config>
__device__ float transform_scores(const AttentionParams& params, const Tile& tile,
                                  const typename Config::SharedMemory& shared, const float* k_scale,
                                  int first, uint32_t hidden, Scores<Config>& scores) {
  float factor = 1;
  const bool scaled = Config::kConvert && params.keys.k_scale;
  if constexpr (Config::kQ == f8e4m3) {
    for_each_score<Config>(scores, [&](float& score, int number, int) {
      score *= shared.query_scale[row_of_score<Config>(number)];
    });
  } else {
    factor = product_unit(params);
    if (scaled || params.logit_cap > 0 || params.alibi_slopes || factor <= 0) {
      for_each_score<Config>(scores, [&](float& score, int, int) { score *= factor; });
      factor = 1;
    }
  }
  if (scaled) {
    for_each_score<Config>(scores,
                           [&](float& score, int, int column) { score *= k_scale[column]; });
  }
  if (params.logit_cap > 0) {
    const float inverse = 1 / params.logit_cap;
    for_each_score<Config>(scores, [&](float& score, int, int) {
      score *= inverse;
      soft_cap(params, score);
    });
  }
  if (params.alibi_slopes) {
    for_each_score<Config>(scores, [&](float& score, int number, int column) {
      const QueryRow& query = shared.queries[row_of_score<Config>(number)];
      const int at = key_position(params.batch.mask, tile.view, first + column);
      add_alibi({query.slope, at - query.position}, score);
    });
  }
  if (hidden != 0) {
    for_each_score<Config>(scores, [&](float& score, int number, int) {
      if (hidden >> number & 1) score = -infinity();
    });
  }
  return factor;
}

// Returns the number to subtract in exponents: 0 for a row that has seen no key, whose base is
// -inf, so that inf - inf does not occur.
__device__ inline float exponent_base(float base) { return base == -infinity() ? 0.0f : base; }

// Turns scores times `factor` into weights relative to the row's base. The base moves to the
// running maximum when that is kMaximumLag above it; only then earlier sums are rescaled. All rows
// of a thread go together, so that their shuffles overlap and one branch serves all.
template <class Config>
__device__ void softmax_tile(Accumulator<Config>& sum, float factor, Scores<Config>& scores) {
  constexpr int kRows =
      2 * Config::kRowFragments;  // a thread; row i is half i % 2 of fragment i / 2
  float most[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const auto& row = scores[i / 2];
    const int low = i % 2 * 2;
    most[i] = fmaxf(row[0][low], row[0][low + 1]);
#pragma unroll
    for (int n = 1; n < Config::kWarpKeys / 8; ++n) {
      most[i] = fmaxf(most[i], fmaxf(row[n][low], row[n][low + 1]));
    }
  }
  // Four adjacent lanes share a row.
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
#pragma unroll
    for (float& value : most) value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
  }
  bool moves = false;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    most[i] *= factor;
    moves |= most[i] > sum.base[i / 2][i % 2] + Config::kMaximumLag;
  }
  if (__any_sync(~0u, moves)) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float& base = sum.base[i / 2][i % 2];
      const bool own = most[i] > base + Config::kMaximumLag;
      const float rescale = own ? exp2_fast(base - most[i]) : 1.0f;
      if (own) base = most[i];
      sum.sum[i / 2][i % 2] *= rescale;
#pragma unroll
      for (auto& out : sum.out[i / 2]) {
        out[i % 2 * 2] *= rescale;
        out[i % 2 * 2 + 1] *= rescale;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int low = i % 2 * 2;
    const float subtracted = exponent_base(sum.base[i / 2][i % 2]);
    float total = 0;
#pragma unroll
    for (auto& score : scores[i / 2]) {
      score[low] = exp2_fast(fmaf(score[low], factor, -subtracted));
      score[low + 1] = exp2_fast(fmaf(score[low + 1], factor, -subtracted));
      total += score[low] + score[low + 1];
    }
    sum.sum[i / 2][i % 2] += total;
  }
}

template <class Config>
__device__ void add_values(const AttentionParams& params,
                           const typename Config::SharedMemory& shared, int v_stage, int step,
                           const float* v_scale, Scores<Config>& weights,
                           Accumulator<Config>& sum) {
  const int lane = threadIdx.x % 32;
  if (Config::kConvert && params.keys.v_scale && params.keys.scale_slot_stride) {
    for_each_score<Config>(weights, [&](float& weight, int, int column) {
      weight *= v_scale[column] * Config::kScaleUnit;
    });
  }
#pragma unroll
  for (int n = 0; n < Config::kWarpKeys / 16; ++n) {
    uint32_t p[Config::kRowFragments][4];
#pragma unroll
    for (int m = 0; m < Config::kRowFragments; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&pair)[4] = weights[m][2 * n + i / 2];
        p[m][i] = pack<Config::kMath>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int d = 0; d < Config::kHeadDimV; d += 16) {
      uint32_t v[4];
      load_matrices_transposed(
          v, &shared.v[v_stage][step + warp_key<Config>() + n * 16 + lane % 16][d + lane / 16 * 8]);
#pragma unroll
      for (int m = 0; m < Config::kRowFragments; ++m) {
        multiply_add<Config::kMath>(sum.out[m][d / 8], p[m], v[0], v[1]);
        multiply_add<Config::kMath>(sum.out[m][d / 8 + 1], p[m], v[2], v[3]);
      }
    }
  }
}

}  // namespace fovea::kernels::cuda
