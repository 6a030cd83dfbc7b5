// SPDX-License-Identifier: Apache-2.0
// Scales the sums, adds the bias and writes the rows of the choices.
#pragma once

#include "kernels/cuda/portable/expert_gemm/load.cuh"

namespace fovea::kernels::cuda {

__device__ inline void write_pair(const ExpertGemmParams& params, const ExpertTile& tile, int row,
                                  int column, float low, float high) {
  if (row >= tile.rows || tile.column + column >= params.n) return;
  const int64_t choice = tile.choices[row];
  const float scale = params.scale ? params.scale[choice] : 1.0f;
  low *= scale;
  high *= scale;
  if (tile.bias) {
    low += tile.bias[tile.column + column];
    high += tile.bias[tile.column + column + 1];
  }
  const int64_t at = choice * params.out_stride + tile.out_column + column;
  if (params.out_is_f32) {
    *reinterpret_cast<float2*>(static_cast<float*>(params.out) + at) = make_float2(low, high);
  } else {
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(params.out) + at) = pack<bf16>(low, high);
  }
}

}  // namespace fovea::kernels::cuda
