// SPDX-License-Identifier: Apache-2.0
// The online softmax (Milakov and Gimelshein, arXiv:1805.02867) of row blocks. A score s has the
// weight 2^(factor * s): the scale and log2(e) enter by a fused multiply-add, so that neither q nor
// the scores are rounded once more.
#pragma once

#include "kernels/cpu/simd/attention/work.h"
#include "kernels/cpu/simd/exponentials.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// Multiplying a maximum by the factor rounds it, and the fused multiply-add leaves that rounding in
// the exponents of all weights. It cancels out while it is small: up to 16 for this maximum. Above
// it, scores are rounded as their maximum is, before the maximum is subtracted.
constexpr float kLargestFused = 0x1p28f;

// The scores of a row block with one tile.
struct SoftmaxTile {
  float* scores;          // [rows, kTileKeys]; become the weights
  int32_t begin, end;     // vectors of the tile to use
  int32_t rows;           // <= kLanes
  float factor;           // > 0
  const float* v_scales;  // [kTileKeys], folded into the weights, or null
  float* m;               // [rows] maxima so far, times the factor
  float* l_lanes;         // [rows, kPadFloats] sums so far, per lane
  float* decay;           // [kPadFloats] out: factor of earlier results
};

HWY_INLINE F32 max_of_vectors(const float* scores, int32_t begin, int32_t end) {
  F32 top = hn::Load(kF32, scores + begin * kLanes);
  for (int32_t v = begin + 1; v < end; ++v) top = hn::Max(top, hn::Load(kF32, scores + v * kLanes));
  return top;
}

#if HWY_TARGET == HWY_AVX3
// Returns the maxima of neighbouring 128-bit blocks of a, then those of b.
HWY_INLINE __m512 max_halves(__m512 a, __m512 b) {
  return _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
// Does the same for neighbouring elements within each block.
HWY_INLINE __m512 max_pairs(__m512 a, __m512 b) {
  return _mm512_max_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

// Returns the maximum of row r in lane r, for 12 rows of a whole tile.
HWY_INLINE F32 max_of_12_rows(const float* scores) {
  __m512 four[3];  // [i] block b: four partial maxima of row 4 * i + b
  for (int i = 0; i < 3; ++i) {
    __m512 row[4];
    for (int j = 0; j < 4; ++j) {
      row[j] = max_of_vectors(scores + (4 * i + j) * kTileKeys, 0, kTileKeys / kLanes).raw;
    }
    four[i] = max_halves(max_halves(row[0], row[1]), max_halves(row[2], row[3]));
  }
  const __m512 two_each = max_pairs(four[0], four[1]);
  // Block b: rows b, 4 + b, 8 + b, 8 + b.
  const __m512 twelve = max_pairs(two_each, max_pairs(four[2], four[2]));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return F32{_mm512_permutexvar_ps(order, twelve)};
}
#endif

// Returns the maximum of row r in lane r.
HWY_INLINE F32 max_of_rows(const SoftmaxTile& tile) {
#if HWY_TARGET == HWY_AVX3
  if (tile.rows == 12 && tile.begin == 0 && tile.end == kTileKeys / kLanes) {
    return max_of_12_rows(tile.scores);
  }
#endif
  alignas(64) float tops[kLanes] = {};
  for (int32_t r = 0; r < tile.rows; ++r) {
    const F32 top = max_of_vectors(tile.scores + r * kTileKeys, tile.begin, tile.end);
    tops[r] = hn::GetLane(hn::MaxOfLanes(kF32, top));
  }
  return hn::Load(kF32, tops);
}

inline void scale_row(float* s, F32 factor, int32_t begin, int32_t end) {
  for (int32_t v = begin * kLanes; v < end * kLanes; v += kLanes) {
    store(hn::Mul(load(s + v), factor), s + v);
  }
}

// Turns the scores of one row into weights and returns the sums of the weights per lane.
HWY_INLINE F32 weights_of_row(float* s, F32 factor, F32 top, int32_t begin, int32_t end) {
  F32 sum = hn::Zero(kF32);
  for (int32_t v = begin; v < end; ++v) {
    const F32 weight = exp2_non_positive(hn::MulSub(hn::Load(kF32, s + v * kLanes), factor, top));
    sum = hn::Add(sum, weight);
    hn::Store(weight, kF32, s + v * kLanes);
  }
  return sum;
}

// Turns scores into weights and updates maxima and sums.
inline void softmax_tile(const SoftmaxTile& tile) {
  const auto rows = hn::FirstN(kF32, static_cast<size_t>(tile.rows));
  const F32 factor = hn::Set(kF32, tile.factor);
  const F32 old = hn::MaskedLoad(rows, kF32, tile.m);
  const F32 scaled = hn::Mul(max_of_rows(tile), factor);
  const F32 m = hn::IfThenElse(hn::Gt(scaled, old), scaled, old);
  hn::BlendedStore(m, rows, kF32, tile.m);
  // If all keys were hidden so far, any finite number gives weights of 0.
  const F32 finite = hn::IfThenZeroElse(hn::Eq(m, hn::Set(kF32, -HUGE_VALF)), m);
  alignas(64) float tops[kLanes];
  hn::Store(finite, kF32, tops);
  hn::Store(exp2_non_positive(hn::Sub(old, finite)), kF32, tile.decay);
  const bool whole = tile.begin == 0 && tile.end == kTileKeys / kLanes;
  for (int32_t r = 0; r < tile.rows; ++r) {
    float* s = tile.scores + r * kTileKeys;
    const F32 top = hn::Set(kF32, tops[r]);
    F32 left = factor;
    if (fabsf(tops[r]) > kLargestFused) {
      scale_row(s, factor, tile.begin, tile.end);
      left = hn::Set(kF32, 1.0f);
    }
    const F32 sum = whole ? weights_of_row(s, left, top, 0, kTileKeys / kLanes)
                          : weights_of_row(s, left, top, tile.begin, tile.end);
    float* l = tile.l_lanes + r * kPadFloats;
    hn::Store(hn::MulAdd(hn::Load(kF32, l), hn::Set(kF32, tile.decay[r]), sum), kF32, l);
  }
  if (!tile.v_scales) return;
  for (int32_t r = 0; r < tile.rows; ++r) {
    float* s = tile.scores + r * kTileKeys;
    for (int32_t v = tile.begin; v < tile.end; ++v) {
      const F32 scale = hn::Load(kF32, tile.v_scales + v * kLanes);
      hn::Store(hn::Mul(hn::Load(kF32, s + v * kLanes), scale), kF32, s + v * kLanes);
    }
  }
}

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
