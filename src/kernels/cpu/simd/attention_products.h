// SPDX-License-Identifier: Apache-2.0
// The two matrix products of attention on register tiles of R rows by two vectors.
//
// Each element of a product is one chain of fused multiply-adds in ascending order of the summed
// index, whatever R is. So a row has the same bits in a decode step of one row and in the middle of
// a prefill tile.
#pragma once

#include "kernels/cpu/simd/attention_work.h"
#include "kernels/cpu/simd/convert.h"
#include "kernels/cpu/simd/fp8.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// 24 accumulators of 32 registers, or 12 of 16.
constexpr int32_t kProductRows = kLanes == 16 ? 12 : 6;
constexpr int32_t kPanelKeys = 2 * kLanes;
static_assert(kTileKeys % kPanelKeys == 0 && kBlockRows % kProductRows == 0);

// Rows of the smallest product that covers `rows` <= kProductRows.
inline int32_t product_rows(int32_t rows) {
  if (rows <= 2) return rows;
  if (rows <= 4) return 4;
  if (kProductRows == 6) return 6;
  return rows <= 8 ? 8 : 12;
}

// Calls function.run<R>() with R = rows, one of product_rows().
template <class Function>
HWY_INLINE void with_product_rows(int32_t rows, const Function& function) {
  switch (rows) {
    case 1:
      return function.template run<1>();
    case 2:
      return function.template run<2>();
    case 4:
      return function.template run<4>();
    case 8:
      if constexpr (kProductRows > 8) return function.template run<8>();
      [[fallthrough]];
    default:
      return function.template run<kProductRows>();
  }
}

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

// panel[d][key] = rows[key][d] for kPanelKeys keys and d in [0, dim), dim a multiple of 4.
inline void transpose_panel(const float* rows, int64_t stride, int32_t dim, float* panel) {
  for (int32_t half = 0; half < 2; ++half) {
    const float* from = rows + half * kLanes * stride;
    float* to = panel + half * kLanes;
    for (int32_t d = 0; d < dim; d += 4) {
      // Vector j holds keys j, 4 + j, 8 + j, ..., one per block.
      const F32 keys[4] = {load_blocks(from + d, stride), load_blocks(from + d + stride, stride),
                           load_blocks(from + d + 2 * stride, stride),
                           load_blocks(from + d + 3 * stride, stride)};
      F32 dims[4];
      transpose_blocks(keys, dims);
      for (int32_t i = 0; i < 4; ++i) store(dims[i], to + (d + i) * kPanelKeys);
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

// Rows of keys in the cache, and the rows to ask for meanwhile.
struct PanelRows {
  const char* const* rows;  // [kPanelKeys]
  int64_t offset;           // bytes, to the head
  const char* const* next;  // [kPanelKeys] or null
  int64_t next_offset;
};

// What one lane holds while it is transposed: an f32, or two neighbouring bf16 elements of a key.
// Every e4m3 and e5m2 number is a bf16 number.
template <class T>
constexpr int32_t kDimsPerLane = sizeof(T) == 4 ? 1 : 2;

HWY_INLINE F32 load_lanes(const float* from) { return load(from); }
HWY_INLINE F32 load_lanes(const Bf16* from) { return load(reinterpret_cast<const float*>(from)); }
template <class T>
HWY_INLINE F32 load_lanes(const T* from) {
  return hn::BitCast(kF32, load_as_bf16(from));
}

template <int kDims>
HWY_INLINE void store_dims(F32 lanes, float* to) {
  if constexpr (kDims == 1) {
    store(lanes, to);
  } else {
    const hn::Rebind<uint32_t, F32Tag> d32;
    const auto bits = hn::BitCast(d32, lanes);
    store(hn::BitCast(kF32, hn::ShiftLeft<16>(bits)), to);
    store(hn::BitCast(kF32, hn::And(bits, hn::Set(d32, 0xffff0000u))), to + kPanelKeys);
  }
}

// transpose_panel() straight from the cache, reading each line once. `dim` is a multiple of the
// dims that a vector of lanes holds.
template <class T>
inline void transpose_from_cache(const T*, const PanelRows& keys, int32_t dim, float* panel) {
  constexpr int32_t kDims = kDimsPerLane<T>;
  for (int32_t half = 0; half < kPanelKeys; half += kLanes) {
    float* to = panel + half;
    for (int32_t d = 0; d < dim; d += kLanes * kDims, to += kLanes * kDims * kPanelKeys) {
      const int64_t at = d * static_cast<int64_t>(sizeof(T));
      F32 blocks[kLanes / 4][4];
      for (int g = 0; g < kLanes / 4; ++g) {
        F32 rows[4];
        for (int j = 0; j < 4; ++j) {
          const int32_t key = half + 4 * g + j;
          if (keys.next) __builtin_prefetch(keys.next[key] + keys.next_offset + at, 0, 3);
          rows[j] = load_lanes(reinterpret_cast<const T*>(keys.rows[key] + keys.offset + at));
        }
        transpose_blocks(rows, blocks[g]);
      }
      F32 dims[kLanes];
      gather_blocks(blocks, dims);
      for (int i = 0; i < kLanes; ++i) store_dims<kDims>(dims[i], to + i * kDims * kPanelKeys);
    }
  }
}

// scores[r][key] = sum over d of q[d][r] * panel[d][key]; rows of scores are kTileKeys apart.
struct ScoreProduct {
  const float* q;      // [dim, R]
  const float* panel;  // [dim, kPanelKeys]
  int32_t dim;
  float* scores;

  template <int R>
  void run() const {
    F32 sum[R][2];
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = hn::Zero(kF32);
    const float* from = q;
    const float* keys = panel;
    for (int32_t d = 0; d < dim; ++d, from += R, keys += kPanelKeys) {
      const F32 k0 = hn::Load(kF32, keys);
      const F32 k1 = hn::Load(kF32, keys + kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const F32 x = hn::Set(kF32, from[r]);
        sum[r][0] = hn::MulAdd(x, k0, sum[r][0]);
        sum[r][1] = hn::MulAdd(x, k1, sum[r][1]);
      }
    }
    for (int r = 0; r < R; ++r) {
      hn::Store(sum[r][0], kF32, scores + r * kTileKeys);
      hn::Store(sum[r][1], kF32, scores + r * kTileKeys + kLanes);
    }
  }
};

// Vectors of a row of values that R rows take at once: few rows take many, so that a row of the
// cache is read in few pieces.
constexpr int value_vectors(int rows) {
  const int accumulators = kLanes == 16 ? 16 : 8;
  const int vectors = accumulators / rows;
  return vectors < 2 ? 2 : (vectors > 8 ? 8 : vectors);
}

// o[r] = o[r] * decay[r] + sum over keys in [begin, end) of weights[r][key] * values[key], for the
// vectors from element 0 to `width`. Meanwhile it asks for rows that come next.
template <class T>
struct ValueProduct {
  const float* weights;       // [R, kTileKeys]
  const char* const* values;  // [kTileKeys] rows of T
  const float* decay;         // [R]
  int32_t begin, end;
  int32_t width;  // multiple of kLanes
  float* o;       // [R, o_stride]
  int64_t o_stride;
  const char* const* next;  // [kTileKeys] or null
  int64_t next_offset;

  template <int R>
  void run() const {
    constexpr int kMost = value_vectors(R);
    int32_t column = 0;
    for (; column + kMost * kLanes <= width; column += kMost * kLanes) columns<R, kMost>(column);
    if constexpr (kMost == 8) {
      if (column + 4 * kLanes <= width) columns<R, 4>(column), column += 4 * kLanes;
    }
    if constexpr (kMost >= 4) {
      if (column + 2 * kLanes <= width) columns<R, 2>(column), column += 2 * kLanes;
    }
    if (column < width) columns<R, 1>(column);
  }

  template <int R, int kVectors>
  HWY_INLINE void columns(int32_t column) const {
    constexpr int kLine = static_cast<int>(64 / sizeof(T));
    F32 sum[R][kVectors];
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = hn::Mul(hn::Set(kF32, decay[r]),
                            hn::Load(kF32, o + r * o_stride + column + v * kLanes));
      }
    }
    for (int32_t key = begin; key < end; ++key) {
      const T* row = reinterpret_cast<const T*>(values[key]) + column;
      if (next) {
        const T* ahead = reinterpret_cast<const T*>(next[key] + next_offset) + column;
        for (int v = 0; v < kVectors * kLanes; v += kLine) __builtin_prefetch(ahead + v, 0, 3);
      }
      F32 x[kVectors];
      load_vectors(row, x);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const F32 weight = hn::Set(kF32, weights[r * kTileKeys + key]);
        for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(weight, x[v], sum[r][v]);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        hn::Store(sum[r][v], kF32, o + r * o_stride + column + v * kLanes);
      }
    }
  }
};

// A tile of values as strips of columns: value (key, column) is at strip column / kStripColumns,
// row key. A strip is dense, so it keeps to 8 KiB of the first cache.
constexpr int32_t kStripColumns = 2 * kLanes;
constexpr int32_t kStripFloats = kTileKeys * kStripColumns;

template <class T>
inline void load_into_strips(const T* from, int32_t count, int32_t key, float* strips) {
  float* to = strips + key * kStripColumns;
  for (int32_t column = 0; column < count; column += kLanes) {
    const int32_t rest = count - column;
    const F32 value = rest >= kLanes ? load(from + column) : load_first(from + column, rest);
    store(value, to + column / kStripColumns * kStripFloats + column % kStripColumns);
  }
}

// ValueProduct on one strip, or on the half of it that the last columns fill.
struct StripProduct {
  const float* weights;  // [R, kTileKeys]
  const float* strip;    // [kTileKeys, kStripColumns]
  const float* decay;    // [R]
  int32_t begin, end;
  int32_t columns;  // kLanes, or any more for the whole
  float* o;         // [R, o_stride]
  int64_t o_stride;

  template <int R>
  void run() const {
    if (columns > kLanes) {
      add<R, 2>();
    } else {
      add<R, 1>();
    }
  }

  template <int R, int kVectors>
  HWY_INLINE void add() const {
    F32 sum[R][kVectors];
    for (int r = 0; r < R; ++r) {
      const F32 shrink = hn::Set(kF32, decay[r]);
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = hn::Mul(shrink, hn::Load(kF32, o + r * o_stride + v * kLanes));
      }
    }
    const float* values = strip + begin * kStripColumns;
    for (int32_t key = begin; key < end; ++key, values += kStripColumns) {
      F32 x[kVectors];
      for (int v = 0; v < kVectors; ++v) x[v] = hn::Load(kF32, values + v * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const F32 weight = hn::Set(kF32, weights[r * kTileKeys + key]);
        for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(weight, x[v], sum[r][v]);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        hn::Store(sum[r][v], kF32, o + r * o_stride + v * kLanes);
      }
    }
  }
};

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
