// SPDX-License-Identifier: Apache-2.0
// The second product of attention for row blocks: weights times values.
#pragma once

#include "kernels/cpu/simd/attention/fp8.h"
#include "kernels/cpu/simd/attention/keys.h"
#include "kernels/cpu/simd/attention/page_pairs.h"
#include "kernels/cpu/simd/attention/prefetch.h"
#include "kernels/cpu/simd/convert.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// Returns how many vectors of a row of values R rows take at once. Few rows take many, so that a
// row of the cache is read in few pieces.
constexpr int value_vectors(int rows) {
  const int accumulators = kLanes == 16 ? 16 : 8;
  const int vectors = accumulators / rows;
  return vectors < 2 ? 2 : (vectors > 8 ? 8 : vectors);
}

// Loads vectors of values as f32.
template <class T>
class VectorLoader {
 public:
  explicit VectorLoader(const Bf16Bytes*) {}
  template <int kCount>
  HWY_INLINE void load_vectors(const T* from, F32 (&to)[kCount]) const {
    for (int v = 0; v < kCount; ++v) to[v] = load(from + v * kLanes);
  }
};

#if HWY_TARGET == HWY_AVX3
// Takes three instructions for two vectors; load() takes four.
template <>
class VectorLoader<Bf16> {
 public:
  explicit VectorLoader(const Bf16Bytes*) {}
  template <int kCount>
  HWY_INLINE void load_vectors(const Bf16* from, F32 (&to)[kCount]) const {
    if constexpr (kCount == 1) {
      to[0] = load(from);
    } else {
#pragma GCC unroll 4
      for (int v = 0; v < kCount; v += 2) {
        const __m512i bits =
            _mm512_permutexvar_epi64(order_, _mm512_loadu_si512(from + v * kLanes));
        to[v].raw = _mm512_castsi512_ps(_mm512_unpacklo_epi16(_mm512_setzero_si512(), bits));
        to[v + 1].raw = _mm512_castsi512_ps(_mm512_unpackhi_epi16(_mm512_setzero_si512(), bits));
      }
    }
  }

 private:
  const __m512i order_ = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
};

template <>
class VectorLoader<Fp8ByTable> {
 public:
  HWY_INLINE explicit VectorLoader(const Bf16Bytes* bytes) : convert_(*bytes) {}
  template <int kCount>
  HWY_INLINE void load_vectors(const Fp8ByTable* from, F32 (&to)[kCount]) const {
    constexpr __mmask16 kLoaded = kCount >= 4 ? 0xffff : (1 << 4 * kCount) - 1;
#pragma GCC unroll 2
    for (int v = 0; v < kCount; v += 4) {
      convert_.to_f32<1, 16>(_mm512_maskz_loadu_epi32(kLoaded, from + v * kLanes), to, v);
    }
  }

 private:
  Fp8Converter convert_;
};
#endif

// Computes o[r] = o[r] * decay[r] + sum over keys in [begin, end) of weights[r][key] * values[key]
// for the first `width` columns. Meanwhile it prefetches as many lines as it reads; a PagePair
// prefetches for whole groups of kPanelKeys keys.
template <class T, class Rows>
struct ValueProduct {
  const float* weights;  // [R, kTileKeys]
  Rows values;           // RowPointers or PagePair of the tile
  const float* decay;    // [R]
  int32_t begin, end;
  int32_t width;  // multiple of kLanes
  float* o;       // [R, o_stride]
  int64_t o_stride;
  const Bf16Bytes* fp8_bytes;  // for Fp8ByTable

  template <int R>
  void run() const {
    if constexpr (R == 4 && kLanes == 16 && sizeof(T) == sizeof(float)) {
      if (width > value_vectors(R) * kLanes) return run_row_pairs();
    }
    if constexpr (R <= Rows::kMaxQueryRows) run_columns<R, 1>();
  }

  // Takes two rows of weights at a time against a few keys, so that their values are read from
  // front to back (chosen 2026-11-22: 8 % of the bandwidth of f32 with one thread).
  void run_row_pairs() const {
    constexpr int32_t kKeys = 8;
    alignas(8) static constexpr float kNoDecay[2] = {1, 1};
    ValueProduct part = *this;
    for (part.begin = begin; part.begin < end; part.begin += kKeys) {
      part.end = smaller(part.begin + kKeys, end);
      for (int32_t r = 0; r < 4; r += 2) {
        part.weights = weights + r * kTileKeys;
        part.decay = part.begin == begin ? decay + r : kNoDecay;
        part.o = o + r * o_stride;
        part.template run_columns<2, 2>();
      }
    }
  }

  // The values are read kPasses times; each time prefetches its share of the lines.
  template <int R, int kPasses>
  HWY_INLINE void run_columns() const {
    constexpr int kMax = value_vectors(R);
    const int32_t last = Rows::kRowElements > 0 ? Rows::kRowElements : width;
    int32_t column = 0;
    for (; column + kMax * kLanes <= last; column += kMax * kLanes) {
      columns<R, kMax, kPasses>(column);
    }
    if constexpr (kMax == 8) {
      if (column + 4 * kLanes <= last) columns<R, 4, kPasses>(column), column += 4 * kLanes;
    }
    if constexpr (kMax >= 4) {
      if (column + 2 * kLanes <= last) columns<R, 2, kPasses>(column), column += 2 * kLanes;
    }
    if (column < last) columns<R, 1, kPasses>(column);
  }

  template <int R, int kVectors, int kPasses>
  HWY_INLINE void columns(int32_t column) const {
    const VectorLoader<T> loader(fp8_bytes);
    constexpr int32_t kBytes = kVectors * kLanes * static_cast<int32_t>(sizeof(T)) / kPasses;
    constexpr int32_t kLines = (kBytes + 63) / 64;
    F32 sum[R][kVectors];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = hn::Mul(hn::Set(kF32, decay[r]),
                            hn::Load(kF32, o + r * o_stride + column + v * kLanes));
      }
    }
    const int64_t at = column * static_cast<int64_t>(sizeof(T));
    const auto add = [&](int32_t first, int i) {
      F32 x[kVectors];
      loader.load_vectors(reinterpret_cast<const T*>(values.row(first, i, at)), x);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const F32 weight = hn::Set(kF32, weights[r * kTileKeys + first + i]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(weight, x[v], sum[r][v]);
      }
    };
    constexpr int kStripeKeys = Rows::kStripeLines > kLines ? Rows::kStripeLines / kLines : 1;
    auto line = static_cast<size_t>(column * static_cast<int32_t>(sizeof(T)) / 64 * kPanelKeys);
    int32_t key = begin;
    for (; key < end && key % kStripeKeys != 0; ++key) add(key, 0);  // a stripe lies in one page
    for (; key + kStripeKeys <= end; key += kStripeKeys, line += Rows::kStripeLines) {
#pragma GCC unroll 8
      for (int i = 0; i < kStripeKeys; ++i) {
        values.template prefetch<T, kLines>(line, i);
        add(key, i);
      }
    }
    for (; key < end; ++key) add(key, 0);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        hn::Store(sum[r][v], kF32, o + r * o_stride + column + v * kLanes);
      }
    }
  }
};

// A tile of values as strips of columns: value (key, column) is in strip column / kStripColumns,
// row key. A strip has no gaps, so it takes only 8 KiB of the first-level cache.
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

// The same product for values in strips.
struct StripsProduct {
  const float* weights;  // [R, kTileKeys]
  const float* strips;   // [columns / kStripColumns, kTileKeys, kStripColumns]
  const float* decay;    // [R]
  int32_t begin, end;
  int32_t columns;  // multiple of kLanes
  float* o;         // [R, o_stride]
  int64_t o_stride;

  template <int R>
  void run() const {
    int32_t column = 0;
    const float* strip = strips + begin * kStripColumns;
    for (; column + kStripColumns <= columns; column += kStripColumns, strip += kStripFloats) {
      add<R, 2>(strip, o + column);
    }
    if (column < columns) add<R, 1>(strip, o + column);
  }

  template <int R, int kVectors>
  HWY_INLINE void add(const float* values, float* to) const {
    F32 sum[R][kVectors];
    const float* row = to;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r, row += o_stride) {
      const F32 shrink = hn::Set(kF32, decay[r]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = hn::Mul(shrink, hn::Load(kF32, row + v * kLanes));
      }
    }
    const float* from = weights + begin;
    const float* again = same_memory(from);
    const float* const last = weights + end;
    if ((end - begin) % 2 != 0) {
      step<R, kVectors>(from, again, values, sum);
      ++from;
      ++again;
      values += kStripColumns;
    }
    for (; from < last; from += 2, again += 2, values += 2 * kStripColumns) {
      step<R, kVectors>(from, again, values, sum);
      step<R, kVectors>(from + 1, again + 1, values + kStripColumns, sum);
    }
    // Without this GCC computes the address of each store anew.
    float* result = const_cast<float*>(same_memory(to));
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r, result += o_stride) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) hn::Store(sum[r][v], kF32, result + v * kLanes);
    }
  }

  template <int R, int kVectors>
  static HWY_INLINE void step(const float* from, const float* again, const float* values,
                              F32 (&sum)[R][kVectors]) {
    F32 x[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) x[v] = hn::Load(kF32, values + v * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      multiply_by(from + r * kTileKeys, again + r * kTileKeys, r, x, sum[r]);
    }
  }
};

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
