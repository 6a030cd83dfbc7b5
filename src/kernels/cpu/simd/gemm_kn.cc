// SPDX-License-Identifier: Apache-2.0
// Products with weights [k, n], as fused expert weights are stored: the lanes hold neighbouring
// outputs, and x is broadcast.
//
// With few rows (decode) the weight is read once and converted in registers. With more rows, 64
// columns by kGemmDepth are converted to f32 on the stack, and every tile of rows reads them. Both
// sum a block of k in order, so an output has the same bits either way.
#include "kernels/cpu/simd/convert.h"
#include "kernels/cpu/simd/gemm.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// Accumulators: 24 of 32 registers, or 8 of 16.
constexpr int32_t kRows = kLanes == 16 ? 6 : 4;
constexpr int32_t kVectors = kLanes == 16 ? 4 : 2;
constexpr int32_t kColumns = kVectors * kLanes;
static_assert(kGemmPanel % kColumns == 0);

// A few rows of x by some columns of the weight, for one block of k.
template <typename W>
struct Tile {
  const float* x;
  int64_t x_stride;
  const W* w;
  int64_t w_stride;
  int32_t depth;
  float* out;
  int64_t out_stride;
  int32_t columns;
};

HWY_INLINE void add_first(F32 sums, float* to, int32_t count) {
  if (count >= kLanes) {
    store(hn::Add(load(to), sums), to);
  } else if (count > 0) {
    store_first(hn::Add(load_first(to, count), sums), to, count);
  }
}

// Computes out += x * w for `rows` rows and at most kColumns columns, but reads all of kColumns.
// Each element takes one multiply-add per k, in order.
template <int32_t rows>
HWY_INLINE void add_tile(const Tile<float>& tile) {
  F32 sums[rows][kVectors];
#pragma GCC unroll 8
  for (int32_t r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int32_t c = 0; c < kVectors; ++c) sums[r][c] = hn::Zero(kF32);
  }
  const float* row = tile.w;
  for (int32_t k = 0; k < tile.depth; ++k, row += tile.w_stride) {
    F32 w[kVectors];
#pragma GCC unroll 4
    for (int32_t c = 0; c < kVectors; ++c) w[c] = load(row + c * kLanes);
#pragma GCC unroll 8
    for (int32_t r = 0; r < rows; ++r) {
      const F32 x = hn::Set(kF32, tile.x[r * tile.x_stride + k]);
#pragma GCC unroll 4
      for (int32_t c = 0; c < kVectors; ++c) sums[r][c] = hn::MulAdd(x, w[c], sums[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int32_t r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int32_t c = 0; c < kVectors; ++c) {
      add_first(sums[r][c], tile.out + r * tile.out_stride + c * kLanes, tile.columns - c * kLanes);
    }
  }
}

// Calls add_tile for 1 <= rows <= kRows.
template <int32_t at_most>
HWY_INLINE void add_rows(const Tile<float>& tile, int32_t rows) {
  if (rows == at_most) {
    add_tile<at_most>(tile);
  } else if constexpr (at_most > 1) {
    add_rows<at_most - 1>(tile, rows);
  }
}

int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

// Multiplies all rows of a range by one panel of weights in f32, which holds the range's columns.
void multiply_panel(const GemmParams& params, const GemmRange& range, const float* panel, int32_t k,
                    int32_t depth) {
  Tile<float> tile;
  tile.x_stride = params.x_stride;
  tile.w_stride = kGemmPanel;
  tile.depth = depth;
  tile.out_stride = params.out_stride;
  for (int32_t row = range.row_begin; row < range.row_end; row += kRows) {
    tile.x = params.x + row * params.x_stride + k;
    for (int32_t n = range.n_begin; n < range.n_end; n += kColumns) {
      tile.w = panel + (n - range.n_begin);
      tile.columns = least(kColumns, range.n_end - n);
      tile.out = params.out + row * params.out_stride + n;
      add_rows<kRows>(tile, least(kRows, range.row_end - row));
    }
  }
}

// For few rows. Each step of k needs rows of the weight that are pages apart, so it takes many
// columns of each; the sums stay in the first-level cache.
constexpr int32_t kStreamColumns = 512;

// Computes sums[r] += x[r][k, k + steps) * w for `columns` columns.
template <int32_t rows, int32_t steps, typename W>
HWY_INLINE void add_steps(const Tile<W>& tile, float (*sums)[kStreamColumns]) {
  F32 x[rows][steps];
#pragma GCC unroll 8
  for (int32_t r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int32_t s = 0; s < steps; ++s) x[r][s] = hn::Set(kF32, tile.x[r * tile.x_stride + s]);
  }
  for (int32_t c = 0; c < tile.columns; c += kLanes) {
    const int32_t left = tile.columns - c;
    F32 w[steps];
#pragma GCC unroll 4
    for (int32_t s = 0; s < steps; ++s) {
      const W* from = tile.w + s * tile.w_stride + c;
      w[s] = left >= kLanes ? load(from) : load_first(from, left);
    }
#pragma GCC unroll 8
    for (int32_t r = 0; r < rows; ++r) {
      F32 sum = load(sums[r] + c);
#pragma GCC unroll 4
      for (int32_t s = 0; s < steps; ++s) sum = hn::MulAdd(x[r][s], w[s], sum);
      store(sum, sums[r] + c);
    }
  }
}

// Computes out += x * w for one block of k and exactly `rows` rows.
template <int32_t rows, typename W>
void stream_block(Tile<W> tile) {
  alignas(64) float sums[rows][kStreamColumns] = {};
  constexpr int32_t kSteps = 4;
  int32_t k = 0;
  for (; k + kSteps <= tile.depth; k += kSteps) {
    add_steps<rows, kSteps>(tile, sums);
    tile.x += kSteps;
    tile.w += kSteps * tile.w_stride;
  }
  for (; k < tile.depth; ++k) {
    add_steps<rows, 1>(tile, sums);
    tile.x += 1;
    tile.w += tile.w_stride;
  }
  for (int32_t r = 0; r < rows; ++r) {
    for (int32_t c = 0; c < tile.columns; ++c) tile.out[r * tile.out_stride + c] += sums[r][c];
  }
}

template <int32_t at_most, typename W>
void stream_rows(const Tile<W>& tile, int32_t rows) {
  if (rows == at_most) {
    stream_block<at_most>(tile);
  } else if constexpr (at_most > 1) {
    stream_rows<at_most - 1>(tile, rows);
  }
}

template <typename W>
const W* weight_at(const GemmParams& params, int32_t k, int32_t n) {
  return static_cast<const W*>(params.weight) + k * params.weight_stride + n;
}

template <typename W>
void multiply_few_rows(const GemmParams& params, const GemmRange& range) {
  for (int32_t n = range.n_begin; n < range.n_end; n += kStreamColumns) {
    for (int32_t k = 0, step = gemm_depth(params.k); k < params.k; k += step) {
      Tile<W> tile;
      tile.x = params.x + range.row_begin * params.x_stride + k;
      tile.x_stride = params.x_stride;
      tile.w = weight_at<W>(params, k, n);
      tile.w_stride = params.weight_stride;
      tile.depth = least(step, params.k - k);
      tile.out = params.out + range.row_begin * params.out_stride + n;
      tile.out_stride = params.out_stride;
      tile.columns = least(kStreamColumns, range.n_end - n);
      stream_rows<kRows>(tile, range.row_end - range.row_begin);
    }
  }
}

template <typename W>
void multiply_many_rows(const GemmParams& params, const GemmRange& range) {
  alignas(64) float panel[kGemmPanel * kGemmDepth];
  for (int32_t begin = range.n_begin; begin < range.n_end; begin += kGemmPanel) {
    GemmRange part = range;
    part.n_begin = begin;
    part.n_end = least(begin + kGemmPanel, range.n_end);
    for (int32_t k = 0, step = gemm_depth(params.k); k < params.k; k += step) {
      const int32_t depth = least(step, params.k - k);
      for (int32_t i = 0; i < depth; ++i) {
        load_row(weight_at<W>(params, k + i, begin), part.n_end - begin, kGemmPanel,
                 panel + i * kGemmPanel);
      }
      multiply_panel(params, part, panel, k, depth);
    }
  }
}

template <typename W>
void multiply(const GemmParams& params, const GemmRange& range) {
  for (int32_t row = range.row_begin; row < range.row_end; ++row) {
    float* out = params.out + row * params.out_stride;
    for (int32_t n = range.n_begin; n < range.n_end; ++n) {
      out[n] = params.bias ? params.bias[n] : 0.0f;
    }
  }
  if (range.row_end - range.row_begin <= kRows) {
    multiply_few_rows<W>(params, range);
  } else {
    multiply_many_rows<W>(params, range);
  }
}

}  // namespace

void gemm_kn(const GemmParams& params, const GemmRange& range) {
  if (params.weight_dtype == DType::f32) return multiply<float>(params, range);
  if (params.weight_dtype == DType::f16) return multiply<F16>(params, range);
  multiply<Bf16>(params, range);
}

}  // namespace fovea::kernels::cpu::FOVEA_ISA
