// SPDX-License-Identifier: Apache-2.0
// Copies from global to shared memory, 16 bytes at a time, with zeros outside the matrices.
#pragma once

#include "kernels/cuda/portable/expert_gemm/config.cuh"

namespace fovea::kernels::cuda {

// The tile that a CTA computes.
struct ExpertTile {
  const uint16_t* weight;
  const float* bias;
  const int32_t* choices;  // [rows] the choice of each row
  int rows;
  int column;  // first column in its matrix
  int out_column;
};

// Fills sources[kRowTile] with the tile's rows of x, null for rows outside.
template <int kRowTile>
__device__ inline void find_sources(const ExpertGemmParams& params, const ExpertTile& tile,
                                    const uint16_t** sources) {
  for (int row = threadIdx.x; row < kRowTile; row += kGemmWarps * 32) {
    const uint16_t* source = nullptr;
    if (row < tile.rows) {
      const int64_t choice = tile.choices[row];
      const int64_t index = params.source_is_row ? choice / params.top_k : choice;
      source = static_cast<const uint16_t*>(params.x) + index * params.x_stride;
    }
    sources[row] = source;
  }
}

template <int kRowTile, bool kIsKn>
__device__ inline void load_stage(const ExpertGemmParams& params, const ExpertTile& tile,
                                  const uint16_t* const* sources, uint16_t* stage, int k) {
  for (int i = threadIdx.x; i < kRowTile * kChunks; i += kGemmWarps * 32) {
    const int row = i / kChunks;
    const int at = k + i % kChunks * kChunk;
    const bool inside = sources[row] && at < params.k;
    const uint16_t* const from =
        inside ? sources[row] + at : static_cast<const uint16_t*>(params.x);
    copy_async(stage + swizzled(row, i % kChunks), from, inside ? 16 : 0);
  }
  uint16_t* const weights = stage + kRowTile * kDepth;
  for (int i = threadIdx.x; i < Tiles<kRowTile, kIsKn>::kWeightRows * kChunks;
       i += kGemmWarps * 32) {
    const int row = i / kChunks;
    const int chunk = i % kChunks * kChunk;
    const int n = tile.column + (kIsKn ? chunk : row);
    const int depth = k + (kIsKn ? row : chunk);
    const bool inside = n < params.n && depth < params.k;
    const int64_t offset =
        kIsKn ? depth * params.weight_stride + n : n * params.weight_stride + depth;
    copy_async(weights + swizzled(row, i % kChunks), tile.weight + (inside ? offset : 0),
               inside ? 16 : 0);
  }
}

}  // namespace fovea::kernels::cuda
