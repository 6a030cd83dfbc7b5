// SPDX-License-Identifier: Apache-2.0
// Products with weights [n, k] of bf16 by tiles, for one task. Rows of x in f32 are sums of three
// bf16, which have the 24 bits of their significands together, so that every product is exact and
// sums are f32, as on other instruction sets.
//
//   a tile of weights   16 rows x 32 k, from memory as they are
//   a tile of x         16 pairs of k x 16 rows, one for each of the three parts: packed on the
//   stack a tile of results   16 weights x 16 rows; two by two of them share their operands
//
// The order of an element's sum depends on k alone: blocks of gemm_depth(), steps of 32, parts from
// the largest to the smallest. So rows have the same bits in any batch. A task of one row has tiles
// of one column, which are packed and added without a transposition.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/cpu/simd/gemm.h"
#include "kernels/gemm.h"

namespace fovea::kernels::cpu::amx {

inline constexpr int32_t kTileRows = 16;  // rows of x or of the weight
inline constexpr int32_t kTileDepth = 32;
inline constexpr int32_t kParts = 3;
inline constexpr int32_t kTilePairs = kTileDepth / 2;
inline constexpr int32_t kTileWords = kTilePairs * kTileRows;
inline constexpr int32_t kPanelWords = kGemmDepth / kTileDepth * kParts * kTileWords;
// Weights are prefetched so many values of k ahead where few rows use them.
inline constexpr int32_t kAhead = 4 * kTileDepth;

inline __mmask16 first_lanes(int32_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffff : (1u << std::max(count, 0)) - 1);
}

// Cuts f32 into three bf16, in the upper halves of words, whose sum has all bits. Infinities and
// NaN are their first part.
inline void cut(__m512 values, __m512i (&parts)[kParts]) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const __m512i infinity = _mm512_set1_epi32(0x7f800000);
  const __mmask16 finite = _mm512_cmplt_epu32_mask(magnitude, infinity);
  const __mmask16 nan = _mm512_cmpgt_epu32_mask(magnitude, infinity);
  const __m512i first = _mm512_and_si512(bits, upper);
  // A NaN may have its only bits in the lower half.
  parts[0] = _mm512_mask_or_epi32(first, nan, first, _mm512_set1_epi32(0x00400000));
  const __m512 rest = _mm512_maskz_sub_ps(finite, values, _mm512_castsi512_ps(first));
  parts[1] = _mm512_and_si512(_mm512_castps_si512(rest), upper);
  parts[2] = _mm512_castps_si512(_mm512_sub_ps(rest, _mm512_castsi512_ps(parts[1])));
}

// Transposes 16 rows of 16 words.
inline void transpose(__m512i (&rows)[16]) {
  __m512i other[16];
  for (int i = 0; i < 16; i += 2) {
    other[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    other[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(other[i], other[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(other[i], other[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(other[i + 1], other[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(other[i + 1], other[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    for (int half = 0; half < 16; half += 8) {
      other[i + half] = _mm512_shuffle_i32x4(rows[i + half], rows[i + half + 4], 0x88);
      other[i + half + 4] = _mm512_shuffle_i32x4(rows[i + half], rows[i + half + 4], 0xdd);
    }
  }
  for (int i = 0; i < 8; ++i) {
    rows[i] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0xdd);
  }
}

// Returns words of two bf16 from the upper halves of neighbouring words: those of `low` in the even
// lanes, those of `high` in the odd ones.
inline __m512i join_pairs(__m512i low, __m512i high) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
  const auto choose = [&](__m512i a, __m512i b) {  // the upper halves of a, the lower ones of b
    return _mm512_ternarylogic_epi32(upper, a, b, 0xca);
  };
  const __m512i even = choose(_mm512_srli_epi64(low, 32), _mm512_srli_epi64(low, 16));
  const __m512i odd = choose(high, _mm512_slli_epi64(high, 16));
  return _mm512_mask_blend_epi32(0xaaaa, even, odd);
}
// Returns the pair of k in lane `lane` of such words.
constexpr int pair_of_lane(int lane) { return lane / 2 + lane % 2 * 8; }

// Cuts one row's values from k on, up to `depth` of a tile's, into pairs for each part.
inline void cut_pairs(const float* x, int32_t depth, __m512i (&pairs)[kParts]) {
  __m512i low[kParts], high[kParts];
  cut(_mm512_maskz_loadu_ps(first_lanes(depth), x), low);
  cut(_mm512_maskz_loadu_ps(first_lanes(depth - 16), x + 16), high);
  for (int part = 0; part < kParts; ++part) pairs[part] = join_pairs(low[part], high[part]);
}

// Packs up to 16 rows of x, `depth` values of each, into a panel: [step][part][pair][row].
inline void pack(const float* x, int64_t stride, int32_t rows, int32_t depth, uint32_t* panel) {
  for (int32_t k = 0; k < depth; k += kTileDepth, panel += kParts * kTileWords) {
    __m512i parts[kParts][kTileRows] = {};
    for (int32_t row = 0; row < rows; ++row) {
      __m512i pairs[kParts];
      cut_pairs(x + row * stride + k, depth - k, pairs);
      for (int part = 0; part < kParts; ++part) parts[part][row] = pairs[part];
    }
    for (int part = 0; part < kParts; ++part) {
      transpose(parts[part]);
      for (int lane = 0; lane < 16; ++lane) {
        uint32_t* const to = panel + part * kTileWords + pair_of_lane(lane) * kTileRows;
        _mm512_store_si512(to, parts[part][lane]);
      }
    }
  }
}

// Packs one row of x alone: [step][part][pair].
inline void pack_row(const float* x, int32_t depth, uint32_t* panel) {
  alignas(64) static constexpr auto kUpperHalves = [] {
    std::array<uint16_t, kTileDepth> index{};
    for (size_t i = 0; i < index.size(); ++i) index[i] = static_cast<uint16_t>(2 * i + 1);
    return index;
  }();
  const __m512i upper_halves = _mm512_load_si512(kUpperHalves.data());
  for (int32_t k = 0; k < depth; k += kTileDepth) {
    __m512i low[kParts], high[kParts];
    cut(_mm512_maskz_loadu_ps(first_lanes(depth - k), x + k), low);
    cut(_mm512_maskz_loadu_ps(first_lanes(depth - k - 16), x + k + 16), high);
    for (int part = 0; part < kParts; ++part, panel += kTilePairs) {
      _mm512_store_si512(panel, _mm512_permutex2var_epi16(low[part], upper_halves, high[part]));
    }
  }
}

// Adds a tile of results, [weight][row], to the output.
inline void add_results(const float* tile, int32_t rows, int32_t columns, float* out,
                        int64_t stride) {
  const __mmask16 lanes = first_lanes(columns);
  __m512i sums[16];
  for (int i = 0; i < 16; ++i) sums[i] = _mm512_load_si512(tile + i * kTileRows);
  transpose(sums);
  for (int32_t row = 0; row < std::min(rows, kTileRows); ++row) {
    float* const to = out + row * stride;
    const __m512 before = _mm512_maskz_loadu_ps(lanes, to);
    _mm512_mask_storeu_ps(to, lanes, _mm512_add_ps(before, _mm512_castsi512_ps(sums[row])));
  }
}

// Adds a tile of results of one row.
inline void add_row(const float* tile, int32_t columns, float* out) {
  const __mmask16 lanes = first_lanes(columns);
  const __m512 before = _mm512_maskz_loadu_ps(lanes, out);
  _mm512_mask_storeu_ps(out, lanes, _mm512_add_ps(before, _mm512_load_ps(tile)));
}

// A task at one block of k. A tile of x has `width` rows: 1 if the task has one row, else 16.
template <class Tiles, int32_t width>
struct TileGemm {
  const GemmParams& params;
  int32_t n_end;
  int32_t k, depth;  // the block of k

  const uint16_t* weight(int32_t n, int32_t at) const {
    return static_cast<const uint16_t*>(params.weight) + n * params.weight_stride + at;
  }

  // Loads the weights of rows from n on and k from `at` on; those outside are 0.
  template <int tile>
  void load_weights(int32_t n, int32_t at) const {
    const int32_t rows = std::min(kTileRows, n_end - n);
    const int32_t columns = std::min(kTileDepth, k + depth - at);
    if (rows == kTileRows && columns == kTileDepth) {
      return Tiles::template load<tile>(weight(n, at), params.weight_stride * 2);
    }
    alignas(64) uint16_t copy[kTileRows * kTileDepth] = {};
    const __mmask32 lanes = columns == kTileDepth ? ~__mmask32{0} : (__mmask32{1} << columns) - 1;
    for (int32_t row = 0; row < rows; ++row) {
      _mm512_store_si512(copy + row * kTileDepth,
                         _mm512_maskz_loadu_epi16(lanes, weight(n + row, at)));
    }
    Tiles::template load<tile>(copy, 64);
  }

  // Asks for what comes kAhead after a step of 32 rows from n on, which may be in the next rows.
  void prefetch_weights(int32_t n, int32_t step) const {
    int32_t at = step + kAhead;
    if (at >= depth) {
      at -= depth;
      n += 2 * kTileRows;
    }
    if (at >= depth || n + 2 * kTileRows > n_end) return;
    for (int32_t row = 0; row < 2 * kTileRows; ++row) {
      _mm_prefetch(weight(n + row, k + at), _MM_HINT_T0);
    }
  }

  // Multiplies 32 rows of the weight from n on by one or two blocks of 16 rows of x. Tiles 0 to 3
  // hold results, 4 and 5 weights, 6 and 7 rows of x.
  template <bool two_blocks>
  void multiply(int32_t n, const uint32_t* panel) const {
    const bool second = n + kTileRows < n_end;
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    Tiles::template zero<2>();
    Tiles::template zero<3>();
    for (int32_t step = 0; step < depth; step += kTileDepth) {
      load_weights<4>(n, k + step);
      if (second) load_weights<5>(n + kTileRows, k + step);
      if (!two_blocks) prefetch_weights(n, step);
      for (int part = 0; part < kParts; ++part, panel += kTilePairs * width) {
        Tiles::template load<6>(panel, 4 * width);
        Tiles::template add_product<0, 4, 6>();
        if (second) Tiles::template add_product<1, 5, 6>();
        if constexpr (two_blocks) {
          Tiles::template load<7>(panel + kPanelWords, 64);
          Tiles::template add_product<2, 4, 7>();
          if (second) Tiles::template add_product<3, 5, 7>();
        }
      }
    }
  }

  template <int tile>
  void add_tile(int32_t row, int32_t row_end, int32_t n) const {
    if (row >= row_end || n >= n_end) return;
    alignas(64) float results[kTileRows * kTileRows];
    Tiles::template store<tile>(results, 4 * width);
    float* const out = params.out + row * params.out_stride + n;
    if constexpr (width == 1) return add_row(results, n_end - n, out);
    add_results(results, row_end - row, n_end - n, out, params.out_stride);
  }

  // Adds the products of rows [row, row_end), at most 32, with weights from n_begin on.
  void run(int32_t row, int32_t row_end, int32_t n_begin, uint32_t* panel) const {
    const float* const x = params.x + row * params.x_stride + k;
    const int32_t rows = row_end - row;
    if constexpr (width == 1) {
      pack_row(x, depth, panel);
    } else {
      pack(x, params.x_stride, std::min(rows, kTileRows), depth, panel);
    }
    if (rows > kTileRows) {
      pack(x + kTileRows * params.x_stride, params.x_stride, rows - kTileRows, depth,
           panel + kPanelWords);
    }
    for (int32_t n = n_begin; n < n_end; n += 2 * kTileRows) {
      rows > kTileRows ? multiply<true>(n, panel) : multiply<false>(n, panel);
      add_tile<0>(row, row_end, n);
      add_tile<1>(row, row_end, n + kTileRows);
      add_tile<2>(row + kTileRows, row_end, n);
      add_tile<3>(row + kTileRows, row_end, n + kTileRows);
    }
  }
};

template <class Tiles, int32_t width>
void multiply_rows(const GemmParams& params, const GemmRange& range) {
  alignas(64) uint32_t panel[2 * kPanelWords];
  Tiles::configure(width);
  for (int32_t k = 0, step = gemm_depth(params.k); k < params.k; k += step) {
    const TileGemm<Tiles, width> block{params, range.n_end, k, std::min(step, params.k - k)};
    for (int32_t row = range.row_begin; row < range.row_end; row += 2 * kTileRows) {
      block.run(row, std::min(row + 2 * kTileRows, range.row_end), range.n_begin, panel);
    }
  }
  Tiles::release();
}

template <class Tiles>
void multiply(const GemmParams& params, const GemmRange& range) {
  for (int32_t row = range.row_begin; row < range.row_end; ++row) {
    float* const out = params.out + row * params.out_stride;
    for (int32_t n = range.n_begin; n < range.n_end; ++n) {
      out[n] = params.bias != nullptr ? params.bias[n] : 0.0f;
    }
  }
  const bool one = range.row_end - range.row_begin == 1;
  one ? multiply_rows<Tiles, 1>(params, range) : multiply_rows<Tiles, kTileRows>(params, range);
}

}  // namespace fovea::kernels::cpu::amx
