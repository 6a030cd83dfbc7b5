// SPDX-License-Identifier: Apache-2.0
// Products with weights [n, k], as Hugging Face stores them: both operands are contiguous along k,
// so an output element is a dot product whose lanes hold every kLanes-th term. Nothing is
// transposed, and one row of x takes the same path as many.
//
// With few rows (decode), tiles of all rows by 4 weight rows read the weight once and convert it in
// registers. One to three rows read it from its first byte to its last, because the processor's
// prefetch keeps more lines on their way than a core asks for. With more rows, 64 weight rows by
// kGemmDepth are converted to f32 on the stack, and every tile of rows reads them.
#include "kernels/cpu/simd/convert.h"
#include "kernels/cpu/simd/gemm.h"
#include "kernels/cpu/simd/sums_of_lanes.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// Accumulators: 24 of 32 registers, or 12 of 16.
constexpr int32_t kRows = kLanes == 16 ? 6 : 3;
constexpr int32_t kColumns = 4;
// Rows for which a weight row is read to its end before the next one. More rows wait for their own
// multiply-adds, of which four weight rows have four times as many on their way.
constexpr int32_t kInOrder = kLanes == 16 ? 3 : 1;

// A few rows of x by kColumns rows of the weight, for one block of k.
template <typename W>
struct Tile {
  const float* x;
  int64_t x_stride;
  const W* w[kColumns];
  int32_t depth;
  float* out;
  int64_t out_stride;
  int32_t columns;  // existing ones of kColumns; the others repeat the last
  // With few rows: elements from the tile's weights to those that are needed next.
  int64_t ahead;
};

// Adds the sum of the lanes of sums[i] to to[i].
HWY_INLINE void add_sums_of_lanes(const F32* sums, float* to, int32_t columns) {
  alignas(16) float totals[kColumns];
  store_sums_of_lanes(sums, totals);
  if (columns == kColumns) {
    for (int32_t i = 0; i < kColumns; ++i) to[i] += totals[i];
  } else {
    for (int32_t i = 0; i < columns; ++i) to[i] += totals[i];
  }
}

// Adds the products of `rows` rows and `columns` weight rows, beginning with row `first`.
template <int32_t rows, int32_t columns, typename W>
HWY_INLINE void add_products(const Tile<W>& tile, int32_t first, F32 (&sums)[rows][kColumns]) {
  const auto multiply_add = [&](auto&& load_x, auto&& load_w) HWY_ATTR {
    F32 x[rows];
#pragma GCC unroll 8
    for (int32_t r = 0; r < rows; ++r) x[r] = load_x(tile.x + r * tile.x_stride);
#pragma GCC unroll 4
    for (int32_t c = first; c < first + columns; ++c) {
      const F32 w = load_w(tile.w[c]);
#pragma GCC unroll 8
      for (int32_t r = 0; r < rows; ++r) sums[r][c] = hn::MulAdd(x[r], w, sums[r][c]);
    }
  };
  int32_t k = 0;
  for (; k + kLanes <= tile.depth; k += kLanes) {
    const auto at_k = [k](const auto* row) HWY_ATTR { return load(row + k); };
    multiply_add(at_k, at_k);
    if constexpr (sizeof(W) == 2 && columns == kColumns) {
      if (k % 32 != 0) continue;  // a line of the cache
#pragma GCC unroll 4
      for (int32_t c = 0; c < kColumns; ++c) __builtin_prefetch(tile.w[c] + k + tile.ahead);
    }
  }
  if (k < tile.depth) {
    const auto rest = [&](const auto* row) HWY_ATTR { return load_first(row + k, tile.depth - k); };
    multiply_add(rest, rest);
  }
}

// Computes out += x * w^T for `rows` rows. Each element takes one multiply-add per kLanes terms, in
// order.
template <int32_t rows, bool in_order, typename W>
HWY_INLINE void add_tile(const Tile<W>& tile) {
  constexpr int32_t kAtOnce = in_order ? 1 : kColumns;
  F32 sums[rows][kColumns];
#pragma GCC unroll 8
  for (int32_t r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int32_t c = 0; c < kColumns; ++c) sums[r][c] = hn::Zero(kF32);
  }
#pragma GCC unroll 4
  for (int32_t c = 0; c < kColumns; c += kAtOnce) add_products<rows, kAtOnce>(tile, c, sums);
#pragma GCC unroll 8
  for (int32_t r = 0; r < rows; ++r) {
    add_sums_of_lanes(sums[r], tile.out + r * tile.out_stride, tile.columns);
  }
}

// Calls add_tile for 1 <= rows <= at_most.
template <int32_t at_most, bool in_order, typename W>
HWY_INLINE void add_rows(const Tile<W>& tile, int32_t rows) {
  if (rows == at_most) {
    add_tile<at_most, in_order && (at_most <= kInOrder)>(tile);
  } else if constexpr (at_most > 1) {
    add_rows<at_most - 1, in_order>(tile, rows);
  }
}

void fill_with_bias(const GemmParams& params, const GemmRange& range) {
  for (int32_t row = range.row_begin; row < range.row_end; ++row) {
    float* out = params.out + row * params.out_stride;
    for (int32_t n = range.n_begin; n < range.n_end; ++n) {
      out[n] = params.bias ? params.bias[n] : 0.0f;
    }
  }
}

int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

template <typename W>
const W* weight_row(const GemmParams& params, int32_t n) {
  return static_cast<const W*>(params.weight) + n * params.weight_stride;
}

template <typename W>
void multiply_few_rows(const GemmParams& params, const GemmRange& range) {
  for (int32_t n = range.n_begin; n < range.n_end; n += kColumns) {
    Tile<W> tile;
    tile.columns = least(kColumns, range.n_end - n);
    tile.x_stride = params.x_stride;
    tile.out = params.out + range.row_begin * params.out_stride + n;
    tile.out_stride = params.out_stride;
    for (int32_t k = 0, step = gemm_depth(params.k); k < params.k; k += step) {
      tile.depth = least(step, params.k - k);
      tile.x = params.x + range.row_begin * params.x_stride + k;
      for (int32_t c = 0; c < kColumns; ++c) {
        tile.w[c] = weight_row<W>(params, n + least(c, tile.columns - 1)) + k;
      }
      tile.ahead = step < params.k ? step : kColumns * params.weight_stride;
      add_rows<kRows, true>(tile, range.row_end - range.row_begin);
    }
  }
}

// Multiplies all rows by one panel of weights in f32.
void multiply_panel(const GemmParams& params, const GemmRange& rows, Tile<float> tile,
                    const float* panel, int32_t k) {
  for (int32_t row = rows.row_begin; row < rows.row_end; row += kRows) {
    tile.x = params.x + row * params.x_stride + k;
    for (int32_t n = rows.n_begin; n < rows.n_end; n += kColumns) {
      tile.columns = least(kColumns, rows.n_end - n);
      tile.out = params.out + row * params.out_stride + n;
      for (int32_t c = 0; c < kColumns; ++c) {
        tile.w[c] = panel + (n - rows.n_begin + least(c, tile.columns - 1)) * kGemmDepth;
      }
      add_rows<kRows, false>(tile, least(kRows, rows.row_end - row));
    }
  }
}

template <typename W>
void multiply_many_rows(const GemmParams& params, const GemmRange& range) {
  alignas(64) float panel[kGemmPanel * kGemmDepth];
  Tile<float> tile{};
  tile.x_stride = params.x_stride;
  tile.out_stride = params.out_stride;
  for (int32_t begin = range.n_begin; begin < range.n_end; begin += kGemmPanel) {
    GemmRange part = range;
    part.n_begin = begin;
    part.n_end = least(begin + kGemmPanel, range.n_end);
    fill_with_bias(params, part);  // which stays in the cache until it is added to
    for (int32_t k = 0, step = gemm_depth(params.k); k < params.k; k += step) {
      tile.depth = least(step, params.k - k);
      for (int32_t n = begin; n < part.n_end; ++n) {
        // Rounded up to whole vectors, the depth is still within kGemmDepth.
        load_row(weight_row<W>(params, n) + k, tile.depth, tile.depth,
                 panel + (n - begin) * kGemmDepth);
      }
      multiply_panel(params, part, tile, panel, k);
    }
  }
}

template <typename W>
void multiply(const GemmParams& params, const GemmRange& range) {
  if (range.row_end - range.row_begin <= kRows) {
    fill_with_bias(params, range);
    multiply_few_rows<W>(params, range);
  } else {
    multiply_many_rows<W>(params, range);
  }
}

}  // namespace

void gemm_nk(const GemmParams& params, const GemmRange& range) {
  if (params.weight_dtype == DType::f32) return multiply<float>(params, range);
  if (params.weight_dtype == DType::f16) return multiply<F16>(params, range);
  multiply<Bf16>(params, range);
}

}  // namespace fovea::kernels::cpu::FOVEA_ISA
