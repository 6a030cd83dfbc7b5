// SPDX-License-Identifier: Apache-2.0
// Inverts the unit triangular matrix of a chunk. With G_ij = decay_ij k_i k_j below the diagonal
// and B = diag(beta), solve = (I + B G)^-1 B. Blocks of 16 rows, one a warp: the diagonal blocks
// X_w by forward substitution, then row by row of blocks X_wj = -X_ww sum_k G_wk X_kj. Products are
// of bf16 with remainders, so that 16 bits of each factor count.
#pragma once

#include "kernels/cuda/sm90/chunk_common/workers.cuh"

namespace fovea::kernels::cuda {

constexpr int kTriangle = 16;  // rows of a diagonal block
constexpr int kTriangles = kChunkTokens / kTriangle;
constexpr int kPaddedTriangle = kTriangle + 4;  // so that columns begin in different banks

using Triangle = float[kTriangle][kPaddedTriangle];  // by columns

// Sums of 16 x 16 values: d[n] has 8 columns.
struct BlockSums {
  float d[2][4] = {};

  __device__ __forceinline__ void add(const Split<4>& a, const Split<4>& b) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      multiply_add<bf16>(d[n], a.low, b.high[2 * n], b.high[2 * n + 1]);
      multiply_add<bf16>(d[n], a.high, b.low[2 * n], b.low[2 * n + 1]);
      multiply_add<bf16>(d[n], a.high, b.high[2 * n], b.high[2 * n + 1]);
    }
  }
  // Returns the sums as the right operand of a product.
  __device__ __forceinline__ Split<4> as_right() const {
    Split<4> b;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      b.set(2 * n, d[n][0], d[n][1]);
      b.set(2 * n + 1, d[n][2], d[n][3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      b.high[i] = transposed_8x8(b.high[i]);
      b.low[i] = transposed_8x8(b.low[i]);
    }
    return b;
  }
};

struct Solver {
  Tile& high;  // the result, rounded
  Tile& low;   // the remainders
  Triangle (&triangles)[kTriangles];
  Worker worker;
  PlaceAnew place;

  // The address that ldmatrix and stmatrix take from this lane for a block of 16 x 16 values.
  __device__ __forceinline__ uint16_t* lane_row(Tile& tile, int row_block, int column_block) const {
    return swizzled(tile, row_block * kTriangle + place.lane % 16,
                    column_block * 2 + place.lane / 16);
  }

  // Solves the warp's diagonal block. `g` has its rows of G, betas those of the value head.
  __device__ __forceinline__ void solve_triangle(const float (&g)[32], const float* betas) const {
    Triangle& triangle = triangles[place.warp];
    const float beta[2] = {betas[place.row], betas[place.row + 8]};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j / 2 != place.warp) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        triangle[j % 2 * 8 + place.column + i % 2][place.lane / 4 + i / 2 * 8] =
            beta[i / 2] * g[4 * j + i];
      }
    }
    __syncwarp();
    // Lanes l and l + 16 have the same column; the first stores values, the second remainders.
    const int column = place.lane % kTriangle;
    float x[kTriangle];
#pragma unroll
    for (int i = 0; i < kTriangle; ++i) x[i] = 0;
    const float own = betas[place.warp * kTriangle + column];
#pragma unroll
    for (int i = 0; i < kTriangle; ++i) {
      if (i == column) x[i] = own;
    }
#pragma unroll
    for (int k = 0; k < kTriangle - 1; ++k) {
#pragma unroll
      for (int i = (k + 1) / 4 * 4; i < kTriangle; i += 4) {
        const float4 a = *reinterpret_cast<const float4*>(&triangle[k][i]);
        const float column_of_a[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          if (i + n > k) x[i + n] = fmaf(-column_of_a[n], x[k], x[i + n]);
        }
      }
    }
    Tile& to = place.lane < kTriangle ? high : low;
    const int at = place.warp * kTriangle + column;
#pragma unroll
    for (int i = 0; i < kTriangle; ++i) {
      const uint32_t rounded = pack<bf16>(x[i], 0);
      const uint32_t rest = pack<bf16>(x[i] - unpack<bf16>(rounded).x, 0);
      swizzled(to, place.warp * kTriangle + i, at / 8)[at % 8] =
          static_cast<uint16_t>(place.lane < kTriangle ? rounded : rest);
    }
  }

  // Computes the blocks left of the diagonal. Synchronises the worker, and lets the copy engine
  // read the terms.
  __device__ __forceinline__ void solve_rest(const float (&g)[32]) const {
    BlockSums sums[kTriangles - 1];  // sums of G_wk X_kj for each j
    add_row<0>(sums, g);
    add_row<1>(sums, g);
    add_row<2>(sums, g);
    fence_async_proxy();
    worker.sync();
  }

 private:
  // Adds products with row kRow of blocks, and finishes the next row.
  template <int kRow>
  __device__ __forceinline__ void add_row(BlockSums (&sums)[kTriangles - 1],
                                          const float (&g)[32]) const {
    worker.sync();  // the row is complete
    if (place.warp <= kRow) return;
    Split<4> a;
#pragma unroll
    for (int i = 0; i < 4; ++i) a.set(i, g[8 * kRow + 2 * i], g[8 * kRow + 2 * i + 1]);
#pragma unroll
    for (int j = 0; j <= kRow; ++j) {
      Split<4> b;
      load_matrices_transposed(b.high, lane_row(high, kRow, j));
      load_matrices_transposed(b.low, lane_row(low, kRow, j));
      sums[j].add(a, b);
    }
    if (place.warp == kRow + 1) finish_row<kRow + 1>(sums);
  }
  template <int kRow>
  __device__ __forceinline__ void finish_row(const BlockSums (&sums)[kTriangles - 1]) const {
    Split<4> own;
    load_matrices(own.high, lane_row(high, kRow, kRow));
    load_matrices(own.low, lane_row(low, kRow, kRow));
#pragma unroll
    for (int j = 0; j < kRow; ++j) {
      BlockSums product;
      product.add(own, sums[j].as_right());
      Split<4> result;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        result.set(i, -product.d[i / 2][i % 2 * 2], -product.d[i / 2][i % 2 * 2 + 1]);
      }
      store_matrices(lane_row(high, kRow, j), result.high);
      store_matrices(lane_row(low, kRow, j), result.low);
    }
  }
};

}  // namespace fovea::kernels::cuda
