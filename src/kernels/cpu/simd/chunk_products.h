// SPDX-License-Identifier: Apache-2.0
// Products over the tokens of a chunk. Lanes hold neighbouring columns, and each output takes one
// multiply-add per term, in order, so that its bits do not depend on the cut into tiles. For
// sources in kernels/cpu/simd only.
#pragma once

#include "kernels/cpu/simd/convert.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// Twelve chains of additions, which hide the latency of a multiply-add in sixteen registers.
constexpr int32_t kTileRows = 6;
constexpr int32_t kPanelVectors = 2;
// Columns of a panel, the width of a row of every operand but the left one.
constexpr int32_t kPanel = kPanelVectors * kLanes;

// A left operand: element (row, k) is at x[row * row_step + k * k_step].
struct Left {
  const float* x;
  int64_t row_step, k_step;

  Left from(int64_t row, int64_t k) const {
    return {x + row * row_step + k * k_step, row_step, k_step};
  }
};

template <int32_t rows>
struct Tile {
  F32 at[rows][kPanelVectors];
};

template <int32_t rows>
HWY_INLINE void clear_tile(Tile<rows>& tile) {
#pragma GCC unroll 8
  for (int32_t r = 0; r < rows; ++r) {
#pragma GCC unroll 2
    for (int32_t c = 0; c < kPanelVectors; ++c) tile.at[r][c] = hn::Zero(kF32);
  }
}

// Adds left [rows, depth] * right [depth, kPanel].
template <int32_t rows>
HWY_INLINE void add_product(Left left, const float* right, int32_t depth, Tile<rows>& tile) {
  for (int32_t k = 0; k < depth; ++k, right += kPanel, left.x += left.k_step) {
    F32 w[kPanelVectors];
#pragma GCC unroll 2
    for (int32_t c = 0; c < kPanelVectors; ++c) w[c] = load(right + c * kLanes);
#pragma GCC unroll 8
    for (int32_t r = 0; r < rows; ++r) {
      const F32 x = hn::Set(kF32, left.x[r * left.row_step]);
#pragma GCC unroll 2
      for (int32_t c = 0; c < kPanelVectors; ++c) {
        tile.at[r][c] = hn::MulAdd(x, w[c], tile.at[r][c]);
      }
    }
  }
}

template <int32_t at_most, typename Body>
HWY_INLINE void with_tile_rows(int32_t rows, const Body& body) {
  if (rows == at_most) {
    body.template operator()<at_most>();
  } else if constexpr (at_most > 1) {
    with_tile_rows<at_most - 1>(rows, body);
  }
}

// Calls body.template operator()<rows>(first row) for tiles of up to kTileRows rows.
template <typename Body>
HWY_INLINE void for_tiles(int32_t rows, const Body& body) {
  for (int32_t row = 0; row < rows; row += kTileRows) {
    const int32_t count = rows - row < kTileRows ? rows - row : kTileRows;
    with_tile_rows<kTileRows>(
        count, [&]<int32_t tile_rows>() HWY_ATTR { body.template operator()<tile_rows>(row); });
  }
}

// Sets out [rows, kPanel] to left [rows, depth] * right [depth, kPanel].
inline void multiply(const Left& left, const float* right, int32_t rows, int32_t depth,
                     float* out) {
  for_tiles(rows, [&]<int32_t tile_rows>(int32_t row) HWY_ATTR {
    Tile<tile_rows> tile;
    clear_tile(tile);
    add_product(left.from(row, 0), right, depth, tile);
#pragma GCC unroll 8
    for (int32_t r = 0; r < tile_rows; ++r) {
#pragma GCC unroll 2
      for (int32_t c = 0; c < kPanelVectors; ++c) {
        store(tile.at[r][c], out + (row + r) * kPanel + c * kLanes);
      }
    }
  });
}

// Sets out [rows, kPanel] to factor * out + left [rows, depth] * right [depth, kPanel].
inline void scale_and_add(float factor, const Left& left, const float* right, int32_t rows,
                          int32_t depth, float* out) {
  const F32 kept = hn::Set(kF32, factor);
  for_tiles(rows, [&]<int32_t tile_rows>(int32_t row) HWY_ATTR {
    Tile<tile_rows> tile;
    clear_tile(tile);
    add_product(left.from(row, 0), right, depth, tile);
#pragma GCC unroll 8
    for (int32_t r = 0; r < tile_rows; ++r) {
#pragma GCC unroll 2
      for (int32_t c = 0; c < kPanelVectors; ++c) {
        float* at = out + (row + r) * kPanel + c * kLanes;
        store(hn::MulAdd(kept, load(at), tile.at[r][c]), at);
      }
    }
  });
}

// Adds `lower` times `values` to out [tokens, kPanel] below the diagonal and, with `diagonal`, on
// it. lower: [tokens, stride]; terms above the diagonal are not read, because a token must not see
// later ones, not even their NaN. `values` may be `out` without `diagonal`: then out becomes
// (1 - lower)^-1 out, by forward substitution.
template <bool diagonal>
void add_lower(const float* lower, int64_t stride, const float* values, int32_t tokens,
               float* out) {
  for_tiles(tokens, [&]<int32_t rows>(int32_t first) HWY_ATTR {
    Tile<rows> tile;
    clear_tile(tile);
    const Left left = {lower + first * stride, stride, 1};
    add_product(left, values, first, tile);
#pragma GCC unroll 8
    for (int32_t s = 0; s < rows; ++s) {
      float* row = out + (first + s) * kPanel;
      if constexpr (!diagonal) {
#pragma GCC unroll 2
        for (int32_t c = 0; c < kPanelVectors; ++c) {
          store(hn::Add(load(row + c * kLanes), tile.at[s][c]), row + c * kLanes);
        }
      }
      const float* value = values + (first + s) * kPanel;
#pragma GCC unroll 8
      for (int32_t r = diagonal ? s : s + 1; r < rows; ++r) {
        const F32 factor = hn::Set(kF32, left.x[r * stride + first + s]);
#pragma GCC unroll 2
        for (int32_t c = 0; c < kPanelVectors; ++c) {
          tile.at[r][c] = hn::MulAdd(factor, load(value + c * kLanes), tile.at[r][c]);
        }
      }
      if constexpr (diagonal) {
#pragma GCC unroll 2
        for (int32_t c = 0; c < kPanelVectors; ++c) {
          store(hn::Add(load(row + c * kLanes), tile.at[s][c]), row + c * kLanes);
        }
      }
    }
  });
}

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
