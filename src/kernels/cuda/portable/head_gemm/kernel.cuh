// SPDX-License-Identifier: Apache-2.0
// Every head's rows times its own matrix. How many tokens there are is known on the device only:
// the grid covers the most there can be, and CTAs without rows leave at once.
//
//   x -------cp.async--> [stage 0|1|2] --ldmatrix--> mma.sync --> out
//   weights -cp.async-->
#pragma once

#include "kernels/cuda/portable/head_gemm/epilogue.cuh"

namespace fovea::kernels::cuda {

template <int kRowTile, bool kIsKn, Type kType>
struct HeadGemmConfig {
  using Params = HeadGemmParams;
  using Shape = Tiles<kRowTile, kIsKn>;
#if __CUDA_ARCH__ >= 900
  static constexpr int kBlocksPerSm = kRowTile == 16 ? 4 : 2;
#else  // one wide tile is all that fits into shared memory: no limit on its registers then
  static constexpr int kBlocksPerSm = kRowTile == 16 ? 4 : 1;
#endif
  static constexpr KernelTraits kTraits = {Shape::kWarps * 32, Shape::kSharedBytes, kRowTile,
                                           Shape::kColumnTile};

  // False: this CTA has no rows.
  __device__ static bool find_tile(const Params& params, HeadTile& tile) {
    tile.row = blockIdx.x % params.row_tiles * kRowTile;
    tile.rows = min(min(params.tokens, *params.live_tokens) - tile.row, kRowTile);
    if (tile.rows <= 0) return false;
    tile.skip = params.skip ? params.skip + tile.row : nullptr;
    if (tile.skip && !__syncthreads_or(threadIdx.x < kRowTile && tile.has(threadIdx.x))) {
      return false;
    }
    tile.column = blockIdx.x / params.row_tiles * Shape::kColumnTile;
    tile.head = blockIdx.y;
    tile.x = static_cast<const uint16_t*>(params.x) + tile.row * params.x_token_stride +
             tile.head * params.x_head_stride;
    tile.weight =
        static_cast<const uint16_t*>(params.weight) + tile.head * params.weight_head_stride;
    return true;
  }

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(128) uint16_t stages[];
    HeadTile tile;
    if (!find_tile(params, tile)) return;
    const int steps = (params.k + kDepth - 1) / kDepth;
    for (int step = 0; step < kStages - 1; ++step) {
      if (step < steps) load(params, tile, stages, step);
      commit_copies();
    }
    WarpSums<kRowTile, kIsKn> sums = {};
    for (int step = 0; step < steps; ++step) {
      wait_copies<kStages - 2>();
      __syncthreads();
      if (step + kStages - 1 < steps) load(params, tile, stages, step + kStages - 1);
      commit_copies();
      multiply_stage<kRowTile, kIsKn, kType>(stages + step % kStages * Shape::kStageElements, sums);
    }
    write_sums<kRowTile, kIsKn, kType>(params, tile, sums);
  }

  __device__ static void load(const Params& params, const HeadTile& tile, uint16_t* stages,
                              int step) {
    load_stage<kRowTile, kIsKn>(params, tile, stages + step % kStages * Shape::kStageElements,
                                step * kDepth);
  }
};

template <int kRowTile, bool kIsKn, Type kType>
using Config = HeadGemmConfig<kRowTile, kIsKn, kType>;

}  // namespace fovea::kernels::cuda
