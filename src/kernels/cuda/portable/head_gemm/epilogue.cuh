// SPDX-License-Identifier: Apache-2.0
// Stores the sums of a warp to the rows of live tokens.
#pragma once

#include "kernels/cuda/portable/head_gemm/load.cuh"
#include "kernels/cuda/portable/head_gemm/mainloop.cuh"

namespace fovea::kernels::cuda {

template <int kRowTile, bool kIsKn, Type kType>
__device__ inline void write_sums(const HeadGemmParams& params, const HeadTile& tile,
                                  const WarpSums<kRowTile, kIsKn>& sums) {
  using Shape = Tiles<kRowTile, kIsKn>;
  const int lane = tile.thread % 32;
#pragma unroll
  for (int half = 0; half < Shape::kWarpRows / 8; ++half) {
    const int row = warp_row<kRowTile, kIsKn>(tile.thread) + half * 8 + lane / 4;
    if (!tile.has(row)) continue;
    uint16_t* const out = static_cast<uint16_t*>(params.out) +
                          (tile.row + row) * params.out_token_stride +
                          tile.head * params.out_head_stride;
#pragma unroll
    for (int i = 0; i < Shape::kWarpColumns / 8; ++i) {
      const int column =
          tile.column + warp_column<kRowTile, kIsKn>(tile.thread) + i * 8 + lane % 4 * 2;
      if (column >= params.n) continue;
      const float(&pair)[4] = sums[half / 2][i];
      *reinterpret_cast<uint32_t*>(out + column) =
          pack<kType>(pair[half % 2 * 2], pair[half % 2 * 2 + 1]);
    }
  }
}

}  // namespace fovea::kernels::cuda
