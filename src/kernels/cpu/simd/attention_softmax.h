// SPDX-License-Identifier: Apache-2.0
// Exponentials and the online softmax (Milakov and Gimelshein, arXiv:1805.02867) on one tile of
// scores. A score s weighs 2^(factor * s): the scale and log2(e) enter by a fused multiply-add, so
// that neither q nor the scores are rounded once more.
#pragma once

#include <math.h>

#include "kernels/cpu/simd/attention_work.h"
#include "kernels/cpu/simd/convert.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.693147180559945309417f;

// 2^x for x <= 0 within 2 ulp; 0 below 2^-126 and for -inf; 1 for 0; NaN for any NaN.
HWY_INLINE F32 exp2_non_positive(F32 x) {
  const F32 smallest = hn::Set(kF32, -126.0f);
#if HWY_TARGET == HWY_AVX3
  const F32 r{_mm512_reduce_ps(x.raw, _MM_FROUND_TO_NEAREST_INT)};
#else
  const hn::Rebind<int32_t, F32Tag> d32;
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits; 127 more is the bias of
  // exponents.
  const F32 magic = hn::Set(kF32, 12582912.0f + 127.0f);
  const F32 shifted = hn::Add(x, magic);
  const F32 r = hn::Sub(x, hn::Sub(shifted, magic));
#endif
  // Minimax on [-1/2, 1/2] with p(0) = 1; relative error 9e-8.
  F32 p = hn::MulAdd(r, hn::Set(kF32, 0.00132647272f), hn::Set(kF32, 0.00967151264f));
  p = hn::MulAdd(p, r, hn::Set(kF32, 0.0555073374f));
  p = hn::MulAdd(p, r, hn::Set(kF32, 0.240222421f));
  p = hn::MulAdd(p, r, hn::Set(kF32, 0.693146978f));
  p = hn::MulAdd(p, r, hn::Set(kF32, 1.0f));
#if HWY_TARGET == HWY_AVX3
  const __mmask16 normal = _mm512_cmp_ps_mask(x.raw, smallest.raw, _CMP_NLT_UQ);  // or NaN
  return F32{_mm512_maskz_scalef_ps(normal, p.raw, hn::Sub(x, r).raw)};
#else
  // The power of a NaN is some number, but p is NaN, and so is their product.
  const F32 power = hn::BitCast(kF32, hn::ShiftLeft<23>(hn::BitCast(d32, shifted)));
  return hn::IfThenZeroElse(hn::Lt(x, smallest), hn::Mul(p, power));
#endif
}

HWY_INLINE float exp2_non_positive(float x) {
  return hn::GetLane(exp2_non_positive(hn::Set(kF32, x)));
}

// tanh with a relative error of a few ulp: an odd polynomial near 0, e^-2|x| elsewhere.
HWY_INLINE F32 tanh_of(F32 x) {
  const F32 a = hn::Abs(x);
  const F32 e = exp2_non_positive(hn::Mul(a, hn::Set(kF32, -2.0f * kLog2E)));
  const F32 one = hn::Set(kF32, 1.0f);
  const F32 far = hn::Div(hn::Sub(one, e), hn::Add(one, e));
  const F32 s = hn::Mul(x, x);
  // Minimax of (tanh(x) / x - 1) / x^2 on [0, 0.625^2].
  F32 p = hn::MulAdd(s, hn::Set(kF32, -0.00570498872745f), hn::Set(kF32, 0.0206390887954f));
  p = hn::MulAdd(p, s, hn::Set(kF32, -0.0537397155531f));
  p = hn::MulAdd(p, s, hn::Set(kF32, 0.133314422036f));
  p = hn::MulAdd(p, s, hn::Set(kF32, -0.333332819422f));
  const F32 near = hn::MulAdd(hn::Mul(p, s), a, a);
  return hn::CopySign(hn::IfThenElse(hn::Lt(a, hn::Set(kF32, 0.625f)), near, far), x);
}

// A maximum is rounded when it is multiplied by the factor; a fused multiply-add then leaves the
// rounding in the exponents of all weights, which cancels out as long as it is small: 16 for this
// maximum. Beyond it scores are rounded like their maximum, before it is subtracted.
constexpr float kLargestFused = 0x1p28f;

// One tile of one block of rows.
struct SoftmaxTile {
  float* scores;          // [rows, kTileKeys]; become the weights
  int32_t begin, end;     // vectors of the tile
  int32_t rows;           // <= kLanes
  float factor;           // > 0
  const float* v_scales;  // [kTileKeys], folded into the weights, or null
  float* m;               // [rows] maxima so far, times the factor
  float* l_lanes;         // [rows, kPadFloats] sums so far, per lane
  float* decay;           // [kPadFloats] out: what earlier results shrink by
};

HWY_INLINE F32 max_of_vectors(const float* scores, int32_t begin, int32_t end) {
  F32 top = hn::Load(kF32, scores + begin * kLanes);
  for (int32_t v = begin + 1; v < end; ++v) top = hn::Max(top, hn::Load(kF32, scores + v * kLanes));
  return top;
}

#if HWY_TARGET == HWY_AVX3
// Maxima of neighbouring 128-bit blocks, those of a, then those of b.
HWY_INLINE __m512 max_halves(__m512 a, __m512 b) {
  return _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
// The same for elements, within each block.
HWY_INLINE __m512 max_pairs(__m512 a, __m512 b) {
  return _mm512_max_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

// Lane r: the maximum of row r, for 12 rows of whole tiles.
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

// Lane r: the maximum of row r.
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

// The weights of one row in place; returns their sums per lane.
HWY_INLINE F32 weights_of_row(float* s, F32 factor, F32 top, int32_t begin, int32_t end) {
  F32 sum = hn::Zero(kF32);
  for (int32_t v = begin; v < end; ++v) {
    const F32 weight = exp2_non_positive(hn::MulSub(hn::Load(kF32, s + v * kLanes), factor, top));
    sum = hn::Add(sum, weight);
    hn::Store(weight, kF32, s + v * kLanes);
  }
  return sum;
}

inline void softmax_tile(const SoftmaxTile& tile) {
  const auto rows = hn::FirstN(kF32, static_cast<size_t>(tile.rows));
  const F32 factor = hn::Set(kF32, tile.factor);
  const F32 old = hn::MaskedLoad(rows, kF32, tile.m);
  const F32 scaled = hn::Mul(max_of_rows(tile), factor);
  const F32 m = hn::IfThenElse(hn::Gt(scaled, old), scaled, old);
  hn::BlendedStore(m, rows, kF32, tile.m);
  // All hidden so far: any finite number gives weights of 0.
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
