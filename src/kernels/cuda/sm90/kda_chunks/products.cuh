// SPDX-License-Identifier: Apache-2.0
// Products of keys and of queries with keys of a chunk, each column times the decay between their
// tokens. A decay between two tokens is a product of factors of each that stay in range:
//
//   in the same 8 tokens   from the middle to the later token, from the earlier one to the middle;
//                          one of both may be large, so operands are of tf32
//   in the same 16         from token 8 on, up to token 8; at most 1, so operands are of f16
//   in others              from the begin of the later token's 16, up to the end of the earlier's
//                          16, and the decay between, which joins the latter; f16
//
// Operands are rows of norm 1, or of queries as long as the scale, so that f16 holds them.
#pragma once

#include "kernels/cuda/sm90/kda_chunks/load.cuh"

namespace fovea::kernels::cuda {

// Sums of 8 x 8 values in the layout of sums; rows 0 to 7 are of keys, 8 to 15 of queries.
using KeyAndQuerySums = float[4];

// The products of a warp's 16 tokens by themselves.
struct OwnProducts {
  KeyAndQuerySums first = {}, second = {};  // the first, the second 8 tokens by themselves
  KeyAndQuerySums across = {};              // the second 8 with the first
};

// The products of a warp's 16 tokens with 16, in the layout of sums, 8 columns each.
struct BlockProducts {
  float keys[2][4], queries[2][4];
};

// The scales that make operands of a lane's keys and queries. Rows that are not to be normalised
// have to be multiplied by their norms in addition, which are the factors in shared memory.
struct RowScales {
  float keys[2], queries[2];
  bool normalises;

  __device__ __forceinline__ RowScales(ChunkMemory& shared, bool normalises_, float scale)
      : normalises(normalises_) {
    const PlaceAnew place;
    set(keys, shared.keys[place.warp], 1, shared.key_factors);
    set(queries, shared.queries[place.warp], scale, shared.query_factors);
  }

 private:
  __device__ __forceinline__ void set(float (&scales)[2], const LaneRows& rows, float scale,
                                      float (&factors)[kChunkTokens]) {
    const PlaceAnew place;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float norm = inverse_norm(rows, half);
      scales[half] = scale * norm;
      if (place.lane % 4 == 0) factors[place.row + 8 * half] = normalises ? 1 : 1 / norm;
    }
  }
};

__device__ __forceinline__ float2 times(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }
__device__ __forceinline__ float2 times(float2 a, float b) { return {a.x * b, a.y * b}; }
template <Type kType>
__device__ __forceinline__ uint32_t packed(float2 a) {
  return pack<kType>(a.x, a.y);
}

// Factors of a lane's 8 columns.
struct Factors {
  float2 pairs[4];

  __device__ __forceinline__ Factors(const float (&row)[kKeyDim], int column) {
    const float4 low = *reinterpret_cast<const float4*>(&row[column]);
    const float4 high = *reinterpret_cast<const float4*>(&row[column + 4]);
    pairs[0] = {low.x, low.y};
    pairs[1] = {low.z, low.w};
    pairs[2] = {high.x, high.y};
    pairs[3] = {high.z, high.w};
  }
};

// Two neighbouring columns of a lane's two tokens.
struct ColumnPair {
  float2 to_token[2];    // decays from the middle of the token's 8 to the token
  float2 from_token[2];  // the inverses
  float2 half[2];        // decays of half of 8 tokens

  __device__ __forceinline__ ColumnPair(const LaneDecays& decays, int i) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 middle = {0.5f * kLog2E * decays.totals[n][i],
                             0.5f * kLog2E * decays.totals[n][i + 1]};
      const float2 at = {fmaf(kLog2E, decays.logs[n][i], -middle.x),
                         fmaf(kLog2E, decays.logs[n][i + 1], -middle.y)};
      to_token[n] = {exp2_fast(at.x), exp2_fast(at.y)};
      from_token[n] = {exp2_fast(-at.x), exp2_fast(-at.y)};
      half[n] = {exp2_fast(middle.x), exp2_fast(middle.y)};
    }
  }
};

// Two columns of a lane's two tokens, keys and queries.
struct RowPair {
  float2 later[2];    // keys times the decays from the begin of the 16 tokens
  float2 earlier[2];  // keys times the decays to their end
  float2 read[2];     // queries, as `later`
};

// The operands of products over 16 columns of the second 8 tokens with the first.
struct AcrossOperands {
  uint32_t later[2], read[2], earlier[2];
};

__device__ __forceinline__ void multiply_tf32(KeyAndQuerySums& sums, float2 keys, float2 queries,
                                              float2 others) {
  const uint32_t rows[4] = {to_tf32(keys.x), to_tf32(queries.x), to_tf32(keys.y),
                            to_tf32(queries.y)};
  multiply_add_tf32(sums, rows, to_tf32(others.x), to_tf32(others.y));
}

// Multiplies two columns of each 8 tokens by themselves. Returns the rows of the 16, and sets word
// `word` of the operands across.
__device__ __forceinline__ RowPair multiply_pair(OwnProducts& products, AcrossOperands& across,
                                                 int word, const ColumnPair& decays,
                                                 const float2 (&keys)[2],
                                                 const float2 (&queries)[2]) {
  RowPair rows;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    rows.later[n] = times(keys[n], decays.to_token[n]);
    rows.earlier[n] = times(keys[n], decays.from_token[n]);
    rows.read[n] = times(queries[n], decays.to_token[n]);
    multiply_tf32(n == 0 ? products.first : products.second, rows.later[n], rows.read[n],
                  rows.earlier[n]);
    rows.later[n] = times(rows.later[n], decays.half[n]);
    rows.earlier[n] = times(rows.earlier[n], decays.half[n]);
    rows.read[n] = times(rows.read[n], decays.half[n]);
  }
  across.later[word] = packed<f16>(rows.later[1]);
  across.read[word] = packed<f16>(rows.read[1]);
  across.earlier[word] = packed<f16>(rows.earlier[0]);
  const float2 first = times(decays.half[0], decays.half[0]);
  rows.later[1] = times(rows.later[1], first);
  rows.read[1] = times(rows.read[1], first);
  rows.earlier[0] = times(rows.earlier[0], times(decays.half[1], decays.half[1]));
  return rows;
}

// Words of a lane's row in registers.
__device__ __forceinline__ uint32_t& word_of(uint4& row, int i) {
  return i == 0 ? row.x : i == 1 ? row.y : i == 2 ? row.z : row.w;
}

// Rows of a lane's two tokens in 8 columns, for KdaTerms.
struct TermRows {
  uint4 recalled[2], kept[2], read[2];
};

// Multiplies 32 columns of the warp's tokens with each other. Replaces keys and queries by the
// operands of products with earlier warps, and stores those of products with later ones.
__device__ __forceinline__ TermRows multiply_group(ChunkMemory& shared, OwnProducts& products,
                                                   int group, const LaneDecays& decays,
                                                   const RowScales& scales) {
  const PlaceAnew place;
  const int column = group * 32 + first_column(place);
  const Factors before(shared.decays.before[place.warp], column);
  const Factors after(shared.decays.after[place.warp], column);
  LaneRows &key_rows = shared.keys[place.warp], &query_rows = shared.queries[place.warp];
  uint4 keys[2], queries[2], earlier[2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    keys[n] = key_rows[group][n][place.lane];
    queries[n] = query_rows[group][n][place.lane];
  }
  TermRows terms;
#pragma unroll
  for (int product = 0; product < 2; ++product) {
    AcrossOperands across;
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      const int i = 2 * product + word;
      float2 k[2], q[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        k[n] = times(unpack<bf16>(word_of(keys[n], i)), scales.keys[n]);
        q[n] = times(unpack<bf16>(word_of(queries[n], i)), scales.queries[n]);
      }
      const RowPair rows = multiply_pair(products, across, word, ColumnPair(decays, 2 * i), k, q);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        word_of(keys[n], i) = packed<f16>(rows.later[n]);
        word_of(queries[n], i) = packed<f16>(rows.read[n]);
        word_of(earlier[n], i) = packed<f16>(rows.earlier[n]);
        float2 recalled = times(rows.later[n], before.pairs[i]);
        float2 kept = times(rows.earlier[n], after.pairs[i]);
        float2 read = times(rows.read[n], before.pairs[i]);
        if (!scales.normalises) {
          const int token = place.row + 8 * n;
          recalled = times(recalled, shared.key_factors[token]);
          kept = times(kept, shared.key_factors[token]);
          read = times(read, shared.query_factors[token]);
        }
        word_of(terms.recalled[n], i) = packed<bf16>(recalled);
        word_of(terms.kept[n], i) = packed<bf16>(kept);
        word_of(terms.read[n], i) = packed<bf16>(read);
      }
    }
    const uint32_t rows[4] = {across.later[0], across.read[0], across.later[1], across.read[1]};
    multiply_add<f16>(products.across, rows, across.earlier[0], across.earlier[1]);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    key_rows[group][n][place.lane] = keys[n];
    query_rows[group][n][place.lane] = queries[n];
    if (place.warp < kTriangles - 1) shared.earlier[place.warp][group][n][place.lane] = earlier[n];
  }
  return terms;
}

// Multiplies the warp's tokens with those of an earlier warp.
__device__ __forceinline__ BlockProducts multiply_other(const ChunkMemory& shared, int other) {
  const PlaceAnew place;
  BlockProducts products = {};
#pragma unroll 1
  for (int group = 0; group < kGroups; ++group) {
    const auto& key_rows = shared.keys[place.warp][group];
    const auto& query_rows = shared.queries[place.warp][group];
    const uint4 k[2] = {key_rows[0][place.lane], key_rows[1][place.lane]};
    const uint4 q[2] = {query_rows[0][place.lane], query_rows[1][place.lane]};
    const uint32_t keys[2][4] = {{k[0].x, k[1].x, k[0].y, k[1].y},
                                 {k[0].z, k[1].z, k[0].w, k[1].w}};
    const uint32_t queries[2][4] = {{q[0].x, q[1].x, q[0].y, q[1].y},
                                    {q[0].z, q[1].z, q[0].w, q[1].w}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 columns = shared.earlier[other][group][half][place.lane];
#pragma unroll
      for (int between = 1; between < kTriangles - 1; ++between) {
        if (between <= other || between >= place.warp) continue;
        const uint4 decays = *reinterpret_cast<const uint4*>(
            &shared.across[between - 1][group * 32 + first_column(place)]);
        columns = {multiply_f16(columns.x, decays.x), multiply_f16(columns.y, decays.y),
                   multiply_f16(columns.z, decays.z), multiply_f16(columns.w, decays.w)};
      }
      multiply_add<f16>(products.keys[half], keys[0], columns.x, columns.y);
      multiply_add<f16>(products.keys[half], keys[1], columns.z, columns.w);
      multiply_add<f16>(products.queries[half], queries[0], columns.x, columns.y);
      multiply_add<f16>(products.queries[half], queries[1], columns.z, columns.w);
    }
  }
  return products;
}

// Joins the products of a warp's own tokens; what is not below the diagonal becomes 0, but for the
// diagonal of queries.
__device__ __forceinline__ BlockProducts join(const OwnProducts& own) {
  const PlaceAnew place;
  BlockProducts products;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = place.lane / 4, column = place.column + i % 2;
    const KeyAndQuerySums& left = i < 2 ? own.first : own.across;
    const bool is_below = i >= 2 || column < row, is_at = column == row;
    products.keys[0][i] = is_below ? left[i % 2] : 0;
    products.queries[0][i] = is_below || is_at ? left[2 + i % 2] : 0;
    products.keys[1][i] = i >= 2 && column < row ? own.second[i % 2] : 0;
    products.queries[1][i] = i >= 2 && column <= row ? own.second[2 + i % 2] : 0;
  }
  return products;
}

}  // namespace fovea::kernels::cuda
