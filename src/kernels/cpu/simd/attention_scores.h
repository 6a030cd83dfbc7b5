// SPDX-License-Identifier: Apache-2.0
// The first product of attention: keys become vectors of one dim of many keys, by transposes in
// registers, and meet the queries; through a panel, or at once where rows are few.
#pragma once

#include "kernels/cpu/simd/attention_ahead.h"
#include "kernels/cpu/simd/attention_products.h"
#include "kernels/cpu/simd/fp8.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// Transposes 4 x 4 elements in each 128-bit block: out[i] block b lane j = in[j] block b lane i.
HWY_INLINE void transpose_blocks(const F32 (&in)[4], F32 (&out)[4]) {
  const hn::Repartition<double, F32Tag> pairs;
  const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(kF32, in[0], in[1]));
  const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(kF32, in[2], in[3]));
  const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(kF32, in[0], in[1]));
  const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(kF32, in[2], in[3]));
  out[0] = hn::BitCast(kF32, hn::InterleaveLower(pairs, low01, low23));
  out[1] = hn::BitCast(kF32, hn::InterleaveUpper(pairs, low01, low23));
  out[2] = hn::BitCast(kF32, hn::InterleaveLower(pairs, high01, high23));
  out[3] = hn::BitCast(kF32, hn::InterleaveUpper(pairs, high01, high23));
}

// Block b of the result: 4 floats at from + 4 * b * stride.
HWY_INLINE F32 load_blocks(const float* from, int64_t stride) {
  F32 value = hn::LoadDup128(kF32, from);
  const hn::Rebind<int32_t, F32Tag> d32;
  const auto lane = hn::Iota(d32, 0);
  for (int32_t b = 1; b < kLanes / 4; ++b) {
    const auto above = hn::RebindMask(kF32, hn::Gt(lane, hn::Set(d32, 4 * b - 1)));
    value = hn::IfThenElse(above, hn::LoadDup128(kF32, from + 4 * b * stride), value);
  }
  return value;
}

// kPanelKeys keys as [dim, kPanelKeys], or as groups of [dim, kWideKeys].
template <bool kGroups>
struct KeyPanel {
  float* to;
  int32_t dim;

  // Element d of keys [key, key + kLanes).
  HWY_INLINE void set(int32_t key, int32_t d, F32 keys) const {
    if constexpr (kGroups) {
      const hn::Half<F32Tag> half;
      float* group = to + key * dim + d * kWideKeys;
      hn::StoreU(hn::LowerHalf(half, keys), half, group);
      hn::StoreU(hn::UpperHalf(half, keys), half, group + kWideKeys * dim);
    } else {
      store(keys, to + d * kPanelKeys + key);
    }
  }
};

// panel[d][key] = rows[key][d] for kPanelKeys keys and d in [0, dim), dim a multiple of 4.
template <bool kGroups>
inline void transpose_panel(const float* rows, int64_t stride, const KeyPanel<kGroups>& panel) {
  for (int32_t half = 0; half < 2; ++half) {
    const float* from = rows + half * kLanes * stride;
    for (int32_t d = 0; d < panel.dim; d += 4) {
      // Vector j holds keys j, 4 + j, 8 + j, ..., one per block.
      const F32 keys[4] = {load_blocks(from + d, stride), load_blocks(from + d + stride, stride),
                           load_blocks(from + d + 2 * stride, stride),
                           load_blocks(from + d + 3 * stride, stride)};
      F32 dims[4];
      transpose_blocks(keys, dims);
      for (int32_t i = 0; i < 4; ++i) panel.set(half * kLanes, d + i, dims[i]);
    }
  }
}

// The same for 128-bit blocks: out[4 * b + i] block g = in[g][i] block b.
HWY_INLINE void gather_blocks(const F32 (&in)[kLanes / 4][4], F32 (&out)[kLanes]) {
  for (int i = 0; i < 4; ++i) {
#if HWY_TARGET == HWY_AVX3
    const __m512 low01 = _mm512_shuffle_f32x4(in[0][i].raw, in[1][i].raw, 0x44);
    const __m512 low23 = _mm512_shuffle_f32x4(in[2][i].raw, in[3][i].raw, 0x44);
    const __m512 high01 = _mm512_shuffle_f32x4(in[0][i].raw, in[1][i].raw, 0xee);
    const __m512 high23 = _mm512_shuffle_f32x4(in[2][i].raw, in[3][i].raw, 0xee);
    out[i].raw = _mm512_shuffle_f32x4(low01, low23, 0x88);
    out[4 + i].raw = _mm512_shuffle_f32x4(low01, low23, 0xdd);
    out[8 + i].raw = _mm512_shuffle_f32x4(high01, high23, 0x88);
    out[12 + i].raw = _mm512_shuffle_f32x4(high01, high23, 0xdd);
#else
    out[i] = hn::ConcatLowerLower(kF32, in[1][i], in[0][i]);
    out[4 + i] = hn::ConcatUpperUpper(kF32, in[1][i], in[0][i]);
#endif
  }
}

// What one lane holds while it is transposed: an f32, or two neighbouring bf16 elements of a key.
template <class T>
constexpr int32_t kDimsPerLane = sizeof(T) == 4 ? 1 : 2;

HWY_INLINE F32 load_lanes(const float* from) { return load(from); }
HWY_INLINE F32 load_lanes(const Bf16* from) { return load(reinterpret_cast<const float*>(from)); }
// Dim i of those that each lane holds.
template <int kDims>
HWY_INLINE F32 dim_of(F32 lanes, int i) {
  if constexpr (kDims == 1) return lanes;
  const hn::Rebind<uint32_t, F32Tag> d32;
  const auto bits = hn::BitCast(d32, lanes);
  if (i == 0) return hn::BitCast(kF32, hn::ShiftLeft<16>(bits));
  return hn::BitCast(kF32, hn::And(bits, hn::Set(d32, 0xffff0000u)));
}

// lanes[i] lane j: lane i from element d on of key first + j. Asks for as many lines ahead, where a
// row of keys has `row_lines` of them. Not unrolled it takes the blocks through the stack: 2 to 3 %
// of f32 decode (2026-11-23).
template <class T>
HWY_INLINE void transpose_lines(const SingleRows& keys, int32_t row_lines, int32_t first, int32_t d,
                                F32 (&lanes)[kLanes]) {
  constexpr int32_t kLines = kLanes / 4;
  const int64_t at = d * static_cast<int64_t>(sizeof(T));
  const auto line = static_cast<size_t>(first * row_lines + d / (kLanes * kDimsPerLane<T>)*kLanes);
  F32 blocks[kLanes / 4][4];
#pragma GCC unroll 4
  for (int g = 0; g < kLanes / 4; ++g) {
    keys.template ask<T, kLines>(line, g);
    F32 rows[4];
    for (int j = 0; j < 4; ++j) {
      rows[j] = load_lanes(reinterpret_cast<const T*>(keys.row(first, 4 * g + j, at)));
    }
    transpose_blocks(rows, blocks[g]);
  }
  gather_blocks(blocks, lanes);
}

// transpose_panel() straight from the cache, reading each line once. panel.dim is a multiple of the
// dims that a vector of lanes holds.
template <class T, bool kGroups>
inline void transpose_from_cache(const T*, const SingleRows& keys, KeyPanel<kGroups> panel) {
  constexpr int32_t kDims = kDimsPerLane<T>;
  for (int32_t half = 0; half < kPanelKeys; half += kLanes) {
    for (int32_t d = 0; d < panel.dim; d += kLanes * kDims) {
      F32 lanes[kLanes];
      transpose_lines<T>(keys, panel.dim / (kLanes * kDims), half, d, lanes);
#pragma GCC unroll 32
      for (int i = 0; i < kLanes * kDims; ++i) {
        panel.set(half, d + i, dim_of<kDims>(lanes[i / kDims], i % kDims));
      }
    }
  }
}

#if HWY_TARGET == HWY_AVX3
// 32 bytes of bf16 pairs or f32 of one key below those of another.
HWY_INLINE F32 load_two(const float* low, const float* high) {
  const __m512 a = _mm512_castps256_ps512(_mm256_loadu_ps(low));
  return F32{_mm512_insertf32x8(a, _mm256_loadu_ps(high), 1)};
}
HWY_INLINE F32 load_two(const Bf16* low, const Bf16* high) {
  return load_two(reinterpret_cast<const float*>(low), reinterpret_cast<const float*>(high));
}
HWY_INLINE F32 load_two(const Fp8ByTable* low, const Fp8ByTable* high) {
  return load_two(reinterpret_cast<const float*>(low), reinterpret_cast<const float*>(high));
}

// The dims that each lane holds, as f32.
template <class T>
class DimSplitter {
 public:
  explicit DimSplitter(const Bf16Bytes*) {}
  static constexpr int32_t kDims = kDimsPerLane<T>;
  HWY_INLINE void split(F32 lanes, F32 (&dims)[kDims]) const {
    for (int i = 0; i < kDims; ++i) dims[i] = dim_of<kDims>(lanes, i);
  }
};

template <>
class DimSplitter<Fp8ByTable> {
 public:
  HWY_INLINE explicit DimSplitter(const Bf16Bytes* bytes) : convert_(*bytes) {}
  static constexpr int32_t kDims = 4;
  HWY_INLINE void split(F32 lanes, F32 (&dims)[kDims]) const {
    convert_.to_f32<4, 1>(_mm512_castps_si512(lanes.raw), dims, 0);
  }

 private:
  Fp8Converter convert_;
};

constexpr int32_t kDirectRows = 8;  // their sums take 16 of 32 registers, a step's keys the others
static_assert(kDirectRows == PagePair<128>::kMostRows);

// ScoreProduct of few rows straight from the cache: keys are multiplied as they are transposed.
// A step takes 32 bytes of each of 32 keys, so that 4 rows have 8 chains of sums in flight; of f32,
// where memory is slower than 4 chains, a line of each of 16 keys: 17.9 instead of 13.6 GB/s over
// NHD pages, 22.5 instead of 19.8 over HND (one core of a Zen 5, 2026-11-22).
template <class T, class Rows>
struct DirectScoreProduct {
  const float* q;      // [dim, R]
  Rows keys;           // SingleRows or PagePair, of the panel
  int32_t dim;         // multiple of kStepDims
  int32_t begin, end;  // keys of the panel; of types other than f32 all
  float* scores;
  const Bf16Bytes* fp8_bytes;  // of Fp8ByTable

  static constexpr int32_t kDims = DimSplitter<T>::kDims;
  static constexpr int32_t kStepDims = 8 * kDims;
  static constexpr int32_t kStepBytes = kStepDims * static_cast<int32_t>(sizeof(T));

  template <int R>
  void run() const {
    if constexpr (R <= kDirectRows && sizeof(T) == sizeof(float)) {
      for (int32_t first = begin; first < end; first += kLanes) whole_lines<R>(first);
    } else if constexpr (R <= kDirectRows) {
      F32 low[R], high[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) low[r] = high[r] = hn::Zero(kF32);
      const DimSplitter<T> splitter(fp8_bytes);
      const float* from = q;
      F32 blocks[4][4];
#pragma GCC unroll 4
      for (int g = 0; g < 4; ++g) load_group(0, g, blocks[g]);
      const int32_t last = (dim / kStepDims - 1) * kStepBytes;
      int32_t at = 0;
      for (; at < last; at += kStepBytes, from += kStepDims * R) {
        add<R, true>(at, splitter, from, blocks, low, high);
      }
      add<R, false>(at, splitter, from, blocks, low, high);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        hn::Store(low[r], kF32, scores + r * kTileKeys);
        hn::Store(high[r], kF32, scores + r * kTileKeys + kLanes);
      }
    }
  }

  template <int R>
  HWY_INLINE void whole_lines(int32_t first) const {
    F32 sum[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[r] = hn::Zero(kF32);
    const float* from = q;
    for (int32_t d = 0; d < dim; d += kLanes, from += kLanes * R) {
      F32 dims[kLanes];
      transpose_lines<float>(keys, dim / kLanes, first, d, dims);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          sum[r] = hn::MulAdd(hn::Set(kF32, from[i * R + r]), dims[i], sum[r]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) hn::Store(sum[r], kF32, scores + r * kTileKeys + first);
  }

  // [i]: 128-bit blocks of elements i and 4 + i of keys 8 g to 8 g + 3, then of the next four.
  HWY_INLINE void load_group(int32_t at, int g, F32 (&blocks)[4]) const {
    F32 rows[4];
    for (int j = 0; j < 4; ++j) {
      rows[j] = load_two(reinterpret_cast<const T*>(keys.row(8 * g, j, at)),
                         reinterpret_cast<const T*>(keys.row(8 * g, 4 + j, at)));
    }
    transpose_blocks(rows, blocks);
  }

  // The products with dims of `blocks`, whose place those of the next step take. These are loaded
  // and transposed between the products, where registers become free: else the multiply-adds wait
  // for them, a quarter of the time of bf16 keys in the first cache (2026-11-23).
  template <int R, bool kMore>
  HWY_INLINE void add(int32_t at, const DimSplitter<T>& splitter, const float* from,
                      F32 (&blocks)[4][4], F32 (&low)[R], F32 (&high)[R]) const {
    const float* again = same_memory(from);  // as in multiply_by()
    F32 next[4][4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      constexpr int32_t kLines = kPanelKeys * kStepBytes / 64 / 8;
      keys.template ask<T, kLines>(static_cast<size_t>(at) * kPanelKeys / 64, i);
      F32 x[2][kDims];
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m512 a = blocks[2 * half][i % 4].raw;
        const __m512 b = blocks[2 * half + 1][i % 4].raw;
        const F32 lanes{i < 4 ? _mm512_shuffle_f32x4(a, b, 0x88)
                              : _mm512_shuffle_f32x4(a, b, 0xdd)};
        splitter.split(lanes, x[half]);
      }
      if (kMore && i >= 4) load_group(at + kStepBytes, i - 4, next[i - 4]);
#pragma GCC unroll 4
      for (int j = 0; j < kDims; ++j) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const int n = (i * kDims + j) * R + r;
          low[r] = hn::MulAdd(hn::Set(kF32, from[n]), x[0][j], low[r]);
          high[r] = hn::MulAdd(hn::Set(kF32, again[n]), x[1][j], high[r]);
        }
      }
    }
    if (!kMore) return;
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) blocks[g][i] = next[g][i];
    }
  }
};
#else
constexpr int32_t kDirectRows = 0;  // 16 registers hold too little
#endif

// scores[r][key] = sum over d of q[d][r] * panel[d][key]; rows of scores are kTileKeys apart.
struct ScoreProduct {
  const float* q;      // [dim, R]
  const float* panel;  // [dim, kPanelKeys]
  int32_t dim;         // even
  float* scores;

  template <int R>
  void run() const {
    F32 sum[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = hn::Zero(kF32);
    const float* from = q;
    const float* keys = panel;
    for (int32_t d = 0; d < dim; d += 2, from += 2 * R, keys += 2 * kPanelKeys) {
      const float* again = same_memory(from);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const F32 k[2] = {hn::Load(kF32, keys + i * kPanelKeys),
                          hn::Load(kF32, keys + i * kPanelKeys + kLanes)};
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          multiply_by(from + i * R + r, again + i * R + r, r, k, sum[r]);
        }
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      hn::Store(sum[r][0], kF32, scores + r * kTileKeys);
      hn::Store(sum[r][1], kF32, scores + r * kTileKeys + kLanes);
    }
  }
};

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
