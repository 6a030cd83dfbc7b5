// SPDX-License-Identifier: Apache-2.0
// Lane blocks: blocks of many rows with the rows in the lanes of vectors. Scores lie key by key, o
// column by column.
//
// A lane block has four times as many rows as a row block, so keys come from the second-level cache
// a quarter as often. The softmax needs no maxima across lanes. Both products are one kernel, which
// loads 11 numbers for 24 multiply-adds; row blocks load 14. (Chosen
// 2026-11-23: up to 9 % of a prefill.)
//
// The bits are those of row blocks: each element is the same chain of multiply-adds, and sums of
// weights are kept for kLanes keys and then added as hn::SumOfLanes() does.
#pragma once

#include "kernels/cpu/simd/attention/blocks.h"
#include "kernels/cpu/simd/attention/prefetch.h"
#include "kernels/cpu/simd/attention/softmax.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// Adds factor * y to sum. A factor in memory becomes the operand of the multiply-add. Assembly, as
// GCC chooses registers such that sums have to move.
#if HWY_TARGET == HWY_AVX3
HWY_INLINE void add_product(const float& factor, F32 y, F32& sum) {
  asm("vfmadd231ps %1%{1to16%}, %2, %0" : "+v"(sum.raw) : "m"(factor), "v"(y.raw));
}
HWY_INLINE void add_product(F32 factor, F32 y, F32& sum) {
  asm("vfmadd231ps %1, %2, %0" : "+v"(sum.raw) : "v"(factor.raw), "v"(y.raw));
}
#else
HWY_INLINE void add_product(float factor, F32 y, F32& sum) {
  sum = hn::MulAdd(hn::Set(kF32, factor), y, sum);
}
HWY_INLINE void add_product(F32 factor, F32 y, F32& sum) { sum = hn::MulAdd(factor, y, sum); }
#endif

// Computes x[k][row] = x[k][row] * decay[row] + sum over steps i of factors[i][k] * rows[i][row]:
// scores of keys k as sums over dims, or columns k of o as sums over keys. Prefetches some lines
// before each group of kLaneKeys k.
struct LaneProduct {
  const float* rows;     // [steps, V vectors]
  const float* factors;  // [groups, group_steps, kLaneKeys]
  int32_t steps, groups;
  int32_t group_steps;
  const float* decay;  // [V vectors], or null: sums start at 0
  float* x;            // [groups, kLaneKeys, V vectors]
  PrefetchStream* stream;
  int32_t lines;  // to prefetch before each group

  template <int V>
  HWY_NOINLINE void run() const {
    const float* from = factors;
    float* to = x;
    for (int32_t g = 0; g < groups; ++g) {
      stream->prefetch<2>(lines);
      run_group<V>(from, to);
      from += group_steps * kLaneKeys;
      to += kLaneKeys * V * kLanes;
    }
  }

 private:
  template <int V>
  HWY_INLINE void run_group(const float* factor, float* to) const {
    F32 sum[kLaneKeys][V];
    start(to, sum);
    const float* row = rows;
    const float* const last = factor + steps * kLaneKeys;
    if (steps % 2 != 0) {
      step(row, factor, sum);
      row += V * kLanes;
      factor += kLaneKeys;
    }
    for (; factor < last; row += 2 * V * kLanes, factor += 2 * kLaneKeys) {
      // Factors come from the second-level cache.
      __builtin_prefetch(factor + 24 * kLaneKeys, 0, 3);
      step(row, factor, sum);
      step(row + V * kLanes, factor + kLaneKeys, sum);
    }
#pragma GCC unroll 8
    for (int k = 0; k < kLaneKeys; ++k) {
#pragma GCC unroll 3
      for (int v = 0; v < V; ++v) hn::Store(sum[k][v], kF32, to + (k * V + v) * kLanes);
    }
  }

  template <int V>
  HWY_INLINE void start(const float* from, F32 (&sum)[kLaneKeys][V]) const {
    if (!decay) {
#pragma GCC unroll 8
      for (int k = 0; k < kLaneKeys; ++k) {
#pragma GCC unroll 3
        for (int v = 0; v < V; ++v) sum[k][v] = hn::Zero(kF32);
      }
      return;
    }
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      const F32 shrink = hn::Load(kF32, decay + v * kLanes);
#pragma GCC unroll 8
      for (int k = 0; k < kLaneKeys; ++k) {
        sum[k][v] = hn::Mul(shrink, hn::Load(kF32, from + (k * V + v) * kLanes));
      }
    }
  }

  template <int V>
  static HWY_INLINE void step(const float* row, const float* factor, F32 (&sum)[kLaneKeys][V]) {
    constexpr int kOperands = kLaneKeys / 2;  // factors read from memory; 2 to 6 of 8 are as fast
    F32 y[V];
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) y[v] = hn::Load(kF32, row + v * kLanes);
#pragma GCC unroll 8
    for (int k = 0; k < kLaneKeys; ++k) {
      if (k < kOperands) {
#pragma GCC unroll 3
        for (int v = 0; v < V; ++v) add_product(factor[k], y[v], sum[k][v]);
        continue;
      }
      const F32 f = hn::Set(kF32, factor[k]);
#pragma GCC unroll 3
      for (int v = 0; v < V; ++v) add_product(f, y[v], sum[k][v]);
    }
  }
};

// Loads the values of one key as f32 into groups of kLaneKeys columns: [columns / kLaneKeys,
// kTileKeys, kLaneKeys].
template <class T>
inline void load_into_column_groups(const T* from, int32_t count, int32_t key, float* groups) {
  const hn::Half<F32Tag> half;
  float* to = groups + key * kLaneKeys;
  for (int32_t column = 0; column < count; column += kLanes, to += kLanes * kTileKeys) {
    const int32_t rest = count - column;
    const F32 value = rest >= kLanes ? load(from + column) : load_first(from + column, rest);
    hn::StoreU(hn::LowerHalf(half, value), half, to);
    hn::StoreU(hn::UpperHalf(half, value), half, to + kLaneKeys * kTileKeys);
  }
}

// The online softmax of a lane block with one tile, one vector of rows after another.
struct LaneSoftmax {
  float* scores;          // [kTileKeys, V vectors]; become the weights
  int32_t first, last;    // keys, multiples of kLanes
  float factor;           // > 0
  const float* v_scales;  // [kTileKeys], folded into the weights, or null
  float* m;               // [V vectors] maxima so far, times the factor
  float* l_lanes;         // [kLanes keys, V vectors] sums so far, of keys modulo kLanes
  float* decay;           // [V vectors] out: factor of earlier results

  template <int V>
  void run() const {
    const bool whole = first == 0 && last == kTileKeys && !v_scales;
    for (int v = 0; v < V; ++v) {
      if (whole) {
        update<V * kLanes, true>(v * kLanes);
      } else {
        update<V * kLanes, false>(v * kLanes);
      }
    }
  }

 private:
  // kWhole: all keys of the tile, without scales of values (chosen 2026-11-23: up to 11 % faster).
  template <int32_t kStride, bool kWhole>
  void update(int32_t row) const {
    const int32_t begin = kWhole ? 0 : first;
    const int32_t end = kWhole ? kTileKeys : last;
    float* s = scores + row;
    constexpr int kChains = 8;  // maxima in flight; each of one chain would wait for the one before
    F32 tops[kChains];
#pragma GCC unroll 8
    for (int i = 0; i < kChains; ++i) tops[i] = load(s + (begin + i) * kStride);
    for (int32_t key = begin + kChains; key < end; key += kChains) {
#pragma GCC unroll 8
      for (int i = 0; i < kChains; ++i) {
        tops[i] = hn::Max(tops[i], load(s + (key + i) * kStride));
      }
    }
#pragma GCC unroll 3
    for (int half = kChains / 2; half > 0; half /= 2) {
#pragma GCC unroll 4
      for (int i = 0; i < half; ++i) tops[i] = hn::Max(tops[i], tops[i + half]);
    }
    F32 factors = hn::Set(kF32, factor);
    const F32 old = load(m + row);
    const F32 scaled = hn::Mul(tops[0], factors);
    const F32 now = hn::IfThenElse(hn::Gt(scaled, old), scaled, old);
    store(now, m + row);
    // If all keys were hidden so far, any finite number gives weights of 0.
    const F32 finite = hn::IfThenZeroElse(hn::Eq(now, hn::Set(kF32, -HUGE_VALF)), now);
    const F32 less = exp2_non_positive(hn::Sub(old, finite));
    store(less, decay + row);
    const auto large = hn::Gt(hn::Abs(finite), hn::Set(kF32, kLargestFused));
    if (!hn::AllFalse(kF32, large)) {
      const F32 first_factors = hn::IfThenElse(large, factors, hn::Set(kF32, 1.0f));
      factors = hn::IfThenElse(large, hn::Set(kF32, 1.0f), factors);
      for (int32_t key = begin; key < end; ++key) {
        store(hn::Mul(load(s + key * kStride), first_factors), s + key * kStride);
      }
    }
    float* sums = l_lanes + row;
    for (int32_t j = 0; j < kLanes; ++j, sums += kStride) {
      F32 sum = hn::Zero(kF32);
#pragma GCC unroll 4
      for (int32_t key = begin + j; key < end; key += kLanes) {
        float* at = s + key * kStride;
        const F32 weight = exp2_non_positive(hn::MulSub(hn::Load(kF32, at), factors, finite));
        sum = hn::Add(sum, weight);
        if (kWhole || !v_scales) {
          hn::Store(weight, kF32, at);
        } else {
          hn::Store(hn::Mul(weight, hn::Set(kF32, v_scales[key])), kF32, at);
        }
      }
      store(hn::MulAdd(load(sums), less, sum), sums);
    }
  }
};

// Sets l[row] to the sum of l_lanes[j][row] over j, in the order of hn::SumOfLanes().
struct LaneSums {
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

// Hides `keys` of the tile from the rows of the block that do not see them. `bounds` starts at the
// block's first row.
inline void hide_outside_lanes(const RowBounds* bounds, int32_t rows, int32_t tile_begin,
                               Range keys, float* scores) {
  const int32_t stride = lane_vectors(rows) * kLanes;
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
    for (int32_t n = keys.begin; n < keys.end; ++n) {
      const auto key = hn::Set(d32, tile_begin + n);
      const auto inside = hn::And(hn::Gt(key, before), hn::Lt(key, end));
      const auto in_prefix = hn::And(hn::Gt(key, before_prefix), hn::Lt(key, prefix_end));
      const auto seen = hn::RebindMask(kF32, hn::Or(inside, in_prefix));
      float* at = scores + n * stride + v;
      store(hn::IfThenElse(seen, load(at), hn::Set(kF32, -kInfinity)), at);
    }
  }
}

// Multiplies the scores of `keys` by the scales of the keys.
inline void scale_lane_scores(const float* key_scales, int32_t vectors, Range keys, float* scores) {
  const int32_t stride = vectors * kLanes;
  for (int32_t n = keys.begin; n < keys.end; ++n) {
    const F32 scale = hn::Set(kF32, key_scales[n]);
    for (int32_t r = n * stride; r < (n + 1) * stride; r += kLanes) {
      store(hn::Mul(load(scores + r), scale), scores + r);
    }
  }
}

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
