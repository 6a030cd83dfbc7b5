// SPDX-License-Identifier: Apache-2.0
// Weights [k, n], as fused expert weights are stored: the lanes hold neighbouring outputs, x is
// broadcast. Rows of x pass over 64 columns by kGemmDepth that were converted to f32 on the stack;
// a single tile of rows converts in registers instead.
#include "kernels/cpu/simd/convert.h"
#include "kernels/cpu/simd/gemm.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// Accumulators: 24 of 32 registers, or 8 of 16.
constexpr int32_t kRows = kLanes == 16 ? 6 : 4;
constexpr int32_t kVectors = kLanes == 16 ? 4 : 2;
constexpr int32_t kColumns = kVectors * kLanes;
static_assert(kGemmPanel % kColumns == 0);

// A few rows of x by kColumns columns of the weight, over one block of k.
template <typename W>
struct Tile {
  const float* x;
  int64_t x_stride;
  const W* w;
  int64_t w_stride;
  int32_t depth;
  float* out;
  int64_t out_stride;
  int32_t columns;  // of kColumns that are stored; all of them are read
};

HWY_INLINE void add_first(F32 sums, float* to, int32_t count) {
  if (count >= kLanes) {
    store(hn::Add(load(to), sums), to);
  } else if (count > 0) {
    store_first(hn::Add(load_first(to, count), sums), to, count);
  }
}

// out += x * w for rows rows. Every element: one multiply-add per k, in order.
template <int32_t rows, typename W>
HWY_INLINE void add_tile(const Tile<W>& tile) {
  F32 sums[rows][kVectors];
#pragma GCC unroll 8
  for (int32_t r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int32_t c = 0; c < kVectors; ++c) sums[r][c] = hn::Zero(kF32);
  }
  const W* row = tile.w;
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

// add_tile for 1 <= rows <= kRows.
template <int32_t at_most, typename W>
HWY_INLINE void add_rows(const Tile<W>& tile, int32_t rows) {
  if (rows == at_most) {
    add_tile<at_most>(tile);
  } else if constexpr (at_most > 1) {
    add_rows<at_most - 1>(tile, rows);
  }
}

int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

// All rows of a range over the block of k that `tile` stands at; columns of the range are at most
// those of tile.w.
template <typename W>
void multiply_block(const GemmParams& params, const GemmRange& range, Tile<W> tile, int32_t k) {
  const W* first = tile.w;
  for (int32_t row = range.row_begin; row < range.row_end; row += kRows) {
    tile.x = params.x + row * params.x_stride + k;
    for (int32_t n = range.n_begin; n < range.n_end; n += kColumns) {
      tile.w = first + (n - range.n_begin);
      tile.columns = least(kColumns, range.n_end - n);
      tile.out = params.out + row * params.out_stride + n;
      add_rows<kRows>(tile, least(kRows, range.row_end - row));
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
  const bool few_rows = range.row_end - range.row_begin <= kRows;
  alignas(64) float panel[kGemmPanel * kGemmDepth];
  for (int32_t begin = range.n_begin; begin < range.n_end; begin += kGemmPanel) {
    GemmRange part = range;
    part.n_begin = begin;
    part.n_end = least(begin + kGemmPanel, range.n_end);
    const int32_t columns = part.n_end - begin;
    for (int32_t k = 0; k < params.k; k += kGemmDepth) {
      const W* weight = static_cast<const W*>(params.weight) + k * params.weight_stride + begin;
      const int32_t depth = least(kGemmDepth, params.k - k);
      if (few_rows && columns % kColumns == 0) {
        Tile<W> tile = {nullptr, params.x_stride,   weight, params.weight_stride, depth,
                        nullptr, params.out_stride, 0};
        multiply_block(params, part, tile, k);
      } else {
        for (int32_t i = 0; i < depth; ++i) {
          load_row(weight + i * params.weight_stride, columns, kGemmPanel, panel + i * kGemmPanel);
        }
        Tile<float> tile = {nullptr, params.x_stride,   panel, kGemmPanel, depth,
                            nullptr, params.out_stride, 0};
        multiply_block(params, part, tile, k);
      }
    }
  }
}

}  // namespace

void gemm_kn(const GemmParams& params, const GemmRange& range) {
  if (params.weight_dtype == DType::f32) return multiply<float>(params, range);
  if (params.weight_dtype == DType::f16) return multiply<F16>(params, range);
  multiply<Bf16>(params, range);
}

}  // namespace fovea::kernels::cpu::FOVEA_ISA
