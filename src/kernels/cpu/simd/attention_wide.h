// SPDX-License-Identifier: Apache-2.0
// Blocks of many rows whose scores lie key by key, the rows in the lanes. A block takes four times
// as many rows as one of attention_products.h, so keys come from the second cache a quarter as
// often; the softmax needs no maxima across lanes; and the weights of a key lie next to each other
// for the product with the values: 0 to 4 % of a prefill of head_dim 128, 2 to 9 % of 64 (Emerald
// Rapids with work on the sibling threads, 2026-11-23).
//
// The bits are those of the other blocks: each element is the same chain of multiply-adds, and sums
// of weights are kept for kLanes keys and then added as hn::SumOfLanes() does.
#pragma once

#include "kernels/cpu/simd/attention_products.h"
#include "kernels/cpu/simd/attention_softmax.h"
#include "kernels/cpu/simd/attention_work.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// Vectors that `rows` <= kWideRows rows fill.
inline int32_t wide_vectors(int32_t rows) { return (rows + kLanes - 1) / kLanes; }

// Calls function.run<V>() with V = vectors.
template <class Function>
HWY_INLINE void with_wide_vectors(int32_t vectors, const Function& function) {
  if (vectors == 1) return function.template run<1>();
  if (vectors == 2) return function.template run<2>();
  function.template run<3>();
}

// scores[key][row] = sum over d of keys[d][key] * q[d][row], for kWideKeys keys.
struct WideScoreProduct {
  const float* q;     // [dim, V vectors of rows]
  const float* keys;  // [dim, kWideKeys]
  int32_t dim;        // even
  float* scores;      // [kWideKeys, kWideRows]

  template <int V>
  void run() const {
    F32 sum[kWideKeys][V];
#pragma GCC unroll 8
    for (int k = 0; k < kWideKeys; ++k) {
#pragma GCC unroll 3
      for (int v = 0; v < V; ++v) sum[k][v] = hn::Zero(kF32);
    }
    const float* rows = q;
    const float* from = keys;
    for (int32_t d = 0; d < dim; d += 2, rows += 2 * V * kLanes, from += 2 * kWideKeys) {
      const float* again = same_memory(from);
      const float* once_more = same_memory(again);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        F32 x[V];
#pragma GCC unroll 3
        for (int v = 0; v < V; ++v) x[v] = hn::Load(kF32, rows + (i * V + v) * kLanes);
#pragma GCC unroll 8
        for (int k = 0; k < kWideKeys; ++k) {
          const int at = i * kWideKeys + k;
          multiply_by(from + at, again + at, once_more + at, k, x, sum[k]);
        }
      }
    }
    float* const to = scores;
#pragma GCC unroll 8
    for (int k = 0; k < kWideKeys; ++k) {
#pragma GCC unroll 3
      for (int v = 0; v < V; ++v) hn::Store(sum[k][v], kF32, to + k * kWideRows + v * kLanes);
    }
  }

 private:
  // As the function of the same name in attention_products.h: half of the keys are loaded for each
  // multiply-add.
  template <int V>
  static HWY_INLINE void multiply_by(const float* x, const float* again, const float* once_more,
                                     int k, const F32 (&y)[V], F32 (&sum)[V]) {
    constexpr int kKeysLoadedAgain = kLanes == 16 ? 4 : 0;
    const bool load_again = k < kKeysLoadedAgain;
    const F32 factor = hn::Set(kF32, *x);
    sum[0] = hn::MulAdd(factor, y[0], sum[0]);
    if constexpr (V > 1) {
      sum[1] = hn::MulAdd(load_again ? hn::Set(kF32, *again) : factor, y[1], sum[1]);
    }
    if constexpr (V > 2) {
      sum[2] = hn::MulAdd(load_again ? hn::Set(kF32, *once_more) : factor, y[2], sum[2]);
    }
  }
};

// One tile of one block of rows. Vectors of rows are met one after another.
struct WideSoftmax {
  float* scores;          // [kTileKeys, kWideRows]; become the weights
  int32_t first, last;    // keys, multiples of kLanes
  float factor;           // > 0
  const float* v_scales;  // [kTileKeys], folded into the weights, or null
  float* m;               // [V vectors] maxima so far, times the factor
  float* l_lanes;         // [kLanes keys, V vectors] sums so far, of keys modulo kLanes
  float* decay;           // [V vectors] out: what earlier results shrink by

  template <int V>
  void run() const {
    for (int v = 0; v < V; ++v) {
      weigh(scores + v * kLanes, m + v * kLanes, l_lanes + v * kLanes, V * kLanes,
            decay + v * kLanes);
    }
  }

 private:
  void weigh(float* s, float* top, float* sums, int32_t sum_stride, float* shrink) const {
    F32 tops[4];  // else each maximum waits for the one before
    for (int i = 0; i < 4; ++i) tops[i] = hn::Load(kF32, s + (first + i) * kWideRows);
    for (int32_t key = first + 4; key < last; key += 4) {
      for (int i = 0; i < 4; ++i) {
        tops[i] = hn::Max(tops[i], hn::Load(kF32, s + (key + i) * kWideRows));
      }
    }
    const F32 tile_top = hn::Max(hn::Max(tops[0], tops[1]), hn::Max(tops[2], tops[3]));
    const F32 factors = hn::Set(kF32, factor);
    const F32 old = hn::LoadU(kF32, top);
    const F32 scaled = hn::Mul(tile_top, factors);
    const F32 now = hn::IfThenElse(hn::Gt(scaled, old), scaled, old);
    hn::StoreU(now, kF32, top);
    // All hidden so far: any finite number gives weights of 0.
    const F32 finite = hn::IfThenZeroElse(hn::Eq(now, hn::Set(kF32, -HUGE_VALF)), now);
    const F32 less = exp2_non_positive(hn::Sub(old, finite));
    hn::Store(less, kF32, shrink);
    for (int32_t j = 0; j < kLanes; ++j, sums += sum_stride) {
      F32 sum = hn::Zero(kF32);
      for (int32_t key = first + j; key < last; key += kLanes) {
        float* at = s + key * kWideRows;
        const F32 weight = exp2_non_positive(hn::MulSub(hn::Load(kF32, at), factors, finite));
        sum = hn::Add(sum, weight);
        const F32 stored = v_scales ? hn::Mul(weight, hn::Set(kF32, v_scales[key])) : weight;
        hn::Store(stored, kF32, at);
      }
      hn::StoreU(hn::MulAdd(hn::LoadU(kF32, sums), less, sum), kF32, sums);
    }
  }
};

// l[row] = the sum of l_lanes[j][row] over j, in the order of hn::SumOfLanes().
struct WideSums {
  float* l_lanes;  // [kLanes, V vectors]; changed
  float* l;        // [V vectors]

  template <int V>
  void run() const {
    for (int32_t half = kLanes / 2; half > 0; half /= 2) {
      for (int32_t i = 0; i < half * V * kLanes; i += kLanes) {
        store(hn::Add(load(l_lanes + i), load(l_lanes + i + half * V * kLanes)), l_lanes + i);
      }
    }
    for (int32_t i = 0; i < V * kLanes; i += kLanes) store(load(l_lanes + i), l + i);
  }
};

// Hides keys [first, last) of the tile from the rows that do not see them. bounds: of `rows` rows.
inline void hide_outside(const RowBounds* bounds, int32_t rows, int32_t tile, int32_t first,
                         int32_t last, float* scores) {
  const hn::Rebind<int32_t, F32Tag> d32;
  for (int32_t v = 0; v < rows; v += kLanes) {
    alignas(64) int32_t limits[4][kLanes] = {};
    for (int32_t r = v; r < smaller(rows, v + kLanes); ++r) {
      limits[0][r - v] = bounds[r].begin - 1;
      limits[1][r - v] = bounds[r].end;
      limits[2][r - v] = bounds[r].prefix_begin - 1;
      limits[3][r - v] = bounds[r].prefix_end;
    }
    const auto before = hn::Load(d32, limits[0]);
    const auto end = hn::Load(d32, limits[1]);
    const auto before_prefix = hn::Load(d32, limits[2]);
    const auto prefix_end = hn::Load(d32, limits[3]);
    for (int32_t n = first; n < last; ++n) {
      const auto key = hn::Set(d32, tile + n);
      const auto inside = hn::And(hn::Gt(key, before), hn::Lt(key, end));
      const auto in_prefix = hn::And(hn::Gt(key, before_prefix), hn::Lt(key, prefix_end));
      const auto seen = hn::RebindMask(kF32, hn::Or(inside, in_prefix));
      float* at = scores + n * kWideRows + v;
      store(hn::IfThenElse(seen, load(at), hn::Set(kF32, -HUGE_VALF)), at);
    }
  }
}

// The scores of keys [first, last) times the scales of the keys.
inline void scale_wide_scores(const float* key_scales, int32_t first, int32_t last, float* scores) {
  for (int32_t n = first; n < last; ++n) {
    const F32 scale = hn::Set(kF32, key_scales[n]);
    for (int32_t r = n * kWideRows; r < (n + 1) * kWideRows; r += kLanes) {
      store(hn::Mul(load(scores + r), scale), scores + r);
    }
  }
}

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
