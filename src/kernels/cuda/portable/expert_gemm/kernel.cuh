// SPDX-License-Identifier: Apache-2.0
// Grouped product of a mixture of experts. Only the device knows which rows an expert has, so the
// grid covers every possible tile, and CTAs without rows return at once.
//
//   x (gathered rows) --cp.async--> [stage 0|1|...] --ldmatrix--> mma --> scale, bias --> out rows
//   weights ----------cp.async-->
#pragma once

#include "kernels/cuda/portable/expert_gemm/epilogue.cuh"
#include "kernels/cuda/portable/expert_gemm/mainloop.cuh"

namespace fovea::kernels::cuda {

template <int kRowTile, bool kIsKn>
struct ExpertGemmConfig {
  using Params = ExpertGemmParams;
  using Shape = Tiles<kRowTile, kIsKn>;
  static constexpr int kStages = Shape::kStages;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kGemmWarps * 32, Shape::kSharedBytes, kRowTile,
                                           kColumnTile};

  // Finds the tile of this CTA; returns false if it has no rows.
  __device__ static bool find_tile(const Params& params, ExpertTile& tile) {
    const int expert = blockIdx.x / params.row_tiles;
    const int first = blockIdx.x % params.row_tiles * kRowTile;
    const int count = params.counts[expert];
    if (first >= count) return false;
    const int tiles = (params.n + kColumnTile - 1) / kColumnTile;
    const int which = blockIdx.y / tiles;
    const ExpertMatrix& matrix = params.weights[expert * params.matrices + which];
    tile.weight = static_cast<const uint16_t*>(matrix.weight);
    tile.bias = matrix.bias;
    tile.choices = params.list + static_cast<int64_t>(expert) * params.rows + first;
    tile.rows = min(kRowTile, count - first);
    tile.column = blockIdx.y % tiles * kColumnTile;
    tile.out_column = which * params.n + tile.column;
    return true;
  }

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(128) uint16_t stages[];
    auto* const sources =
        reinterpret_cast<const uint16_t**>(stages + kStages * Shape::kStageElements);
    ExpertTile tile;
    wait_and_allow_next();
    if (!find_tile(params, tile)) return;
    find_sources<kRowTile>(params, tile, sources);
    __syncthreads();

    const int steps = (params.k + kDepth - 1) / kDepth;
    for (int step = 0; step < kStages - 1; ++step) {
      if (step < steps) load(params, tile, sources, stages, step);
      commit_copies();
    }
    float sums[Shape::kWarpColumns / 8][4] = {};
    for (int step = 0; step < steps; ++step) {
      wait_copies<kStages - 2>();
      __syncthreads();
      const int next = step + kStages - 1;
      if (next < steps) load(params, tile, sources, stages, next);
      commit_copies();
      multiply_stage<kRowTile, kIsKn>(stages + step % kStages * Shape::kStageElements, sums);
    }
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int row = (kRowTile == 16 ? 0 : warp * 16) + lane / 4;
    const int column = (kRowTile == 16 ? warp * Shape::kWarpColumns : 0) + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < Shape::kWarpColumns / 8; ++i) {
      write_pair(params, tile, row, column + 8 * i, sums[i][0], sums[i][1]);
      write_pair(params, tile, row + 8, column + 8 * i, sums[i][2], sums[i][3]);
    }
  }

  __device__ static void load(const Params& params, const ExpertTile& tile,
                              const uint16_t* const* sources, uint16_t* stages, int step) {
    load_stage<kRowTile, kIsKn>(params, tile, sources,
                                stages + step % kStages * Shape::kStageElements, step * kDepth);
  }
};

template <int kRowTile, bool kIsKn>
using Config = ExpertGemmConfig<kRowTile, kIsKn>;

}  // namespace fovea::kernels::cuda
