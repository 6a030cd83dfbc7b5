// SPDX-License-Identifier: Apache-2.0
// The first product of attention for row blocks: queries times keys. ScoreProduct reads keys from a
// transposed panel. FusedScoreProduct, for few rows, transposes them on the way.
#pragma once

#include "kernels/cpu/simd/attention/fp8.h"
#include "kernels/cpu/simd/attention/page_pairs.h"
#include "kernels/cpu/simd/attention/transpose.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

#if HWY_TARGET == HWY_AVX3
// Returns 32 bytes of one key in the lower half, 32 bytes of another key in the upper half.
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

// Converts the dims in each lane to f32.
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

// Scores of up to kFusedRows rows with keys that are multiplied as they are transposed. A step
// takes 32 bytes of each of 32 keys, so that 4 rows have 8 chains of sums in flight. f32 takes
// whole lines of 16 keys instead: memory is slower than 4 chains (chosen 2026-11-22: up to 30 % of
// the bandwidth of one core).
template <class T, class Rows>
struct FusedScoreProduct {
  const float* q;      // [dim, R]
  Rows keys;           // RowPointers or PagePair of the panel
  int32_t dim;         // multiple of kStepDims
  int32_t begin, end;  // keys of the panel; only f32 may have fewer than all
  float* scores;
  const Bf16Bytes* fp8_bytes;  // for Fp8ByTable

  static constexpr int32_t kDims = DimSplitter<T>::kDims;
  static constexpr int32_t kStepDims = 8 * kDims;
  static constexpr int32_t kStepBytes = kStepDims * static_cast<int32_t>(sizeof(T));

  template <int R>
  void run() const {
    if constexpr (R <= kFusedRows && sizeof(T) == sizeof(float)) {
      for (int32_t first = begin; first < end; first += kLanes) whole_lines<R>(first);
    } else if constexpr (R <= kFusedRows) {
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

  // Loads 32 bytes of keys [8 g, 8 g + 8), from byte `at` on. blocks[i] then holds lanes i and 4 +
  // i of the first four keys, followed by those of the other four.
  HWY_INLINE void load_group(int32_t at, int g, F32 (&blocks)[4]) const {
    F32 rows[4];
    for (int j = 0; j < 4; ++j) {
      rows[j] = load_two(reinterpret_cast<const T*>(keys.row(8 * g, j, at)),
                         reinterpret_cast<const T*>(keys.row(8 * g, 4 + j, at)));
    }
    transpose_blocks(rows, blocks);
  }

  // Adds the products with the dims in `blocks` and replaces `blocks` by the next step's. These are
  // loaded and transposed between the products, as registers become free; otherwise the
  // multiply-adds would wait for them (2026-11-23: a quarter of the time of bf16 keys in L1).
  template <int R, bool kMore>
  HWY_INLINE void add(int32_t at, const DimSplitter<T>& splitter, const float* from,
                      F32 (&blocks)[4][4], F32 (&low)[R], F32 (&high)[R]) const {
    const float* again = same_memory(from);  // as in multiply_by()
    F32 next[4][4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      constexpr int32_t kLines = kPanelKeys * kStepBytes / 64 / 8;
      keys.template prefetch<T, kLines>(static_cast<size_t>(at) * kPanelKeys / 64, i);
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
#endif

// Computes scores[r][key] = sum over d of q[d][r] * panel[d][key]. Rows of scores are kTileKeys
// apart.
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
