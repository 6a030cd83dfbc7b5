// SPDX-License-Identifier: Apache-2.0
// Loads stages to shared memory, 16 bytes a copy. Elements outside the matrices are zero.
#pragma once

#include "kernels/cuda/portable/head_gemm/config.cuh"

namespace fovea::kernels::cuda {

// The tile that a block computes.
struct HeadTile {
  const uint16_t* x;  // first row
  const uint16_t* weight;
  const uint8_t* skip;  // flags of its rows, or null
  int row;              // first token
  int rows;             // tokens there may be, later the live ones
  int column;           // first column
  int head;
  int thread;  // read anew for each tile, so that values computed from it take no registers

  __device__ bool has(int r) const { return r < rows && !(skip && skip[r]); }
};

template <int kRowTile, bool kIsKn>
__device__ inline void load_rows(const HeadGemmParams& params, const HeadTile& tile,
                                 uint16_t* stage, int k) {
  constexpr int kThreads = Tiles<kRowTile, kIsKn>::kWarps * 32;
  constexpr int kChunks = kDepth / kChunk;
  for (int i = tile.thread; i < kRowTile * kChunks; i += kThreads) {
    const int row = i / kChunks;
    const int at = k + i % kChunks * kChunk;
    const bool inside = row < tile.rows && at < params.k;
    const uint16_t* const from = tile.x + (inside ? row * params.x_token_stride + at : 0);
    copy_async(stage + swizzled<kDepth>(row, i % kChunks), from, inside ? 16 : 0);
  }
}

template <int kRowTile, bool kIsKn>
__device__ inline void load_weights(const HeadGemmParams& params, const HeadTile& tile,
                                    uint16_t* stage, int k) {
  using Shape = Tiles<kRowTile, kIsKn>;
  constexpr int kThreads = Shape::kWarps * 32;
  uint16_t* const weights = stage + kRowTile * kDepth;
  constexpr int kWeightChunks = Shape::kWeightWidth / kChunk;
  for (int i = tile.thread; i < Shape::kWeightRows * kWeightChunks; i += kThreads) {
    const int row = i / kWeightChunks;
    const int chunk = i % kWeightChunks * kChunk;
    const int n = tile.column + (kIsKn ? chunk : row);
    const int depth = k + (kIsKn ? row : chunk);
    const bool inside = n < params.n && depth < params.k;
    const int64_t offset = (kIsKn ? depth : n) * params.weight_row_stride + (kIsKn ? n : depth);
    copy_async(weights + swizzled<Shape::kWeightWidth>(row, i % kWeightChunks),
               tile.weight + (inside ? offset : 0), inside ? 16 : 0);
  }
}

}  // namespace fovea::kernels::cuda
