// SPDX-License-Identifier: Apache-2.0
// Multiplies every head's rows with its own matrix. The number of tokens is known only on the
// device: the grid covers the maximum, and blocks without rows end at once.
//
//   x -------cp.async--> [stage 0|1|...] --ldmatrix--> mma.sync --> out
//   weights -cp.async-->
//
// With few rows, weights are loaded before the wait for the preceding kernel, since no kernel of a
// pass writes them.
#pragma once

#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/portable/head_gemm/epilogue.cuh"

namespace fovea::kernels::cuda {

// kSeveral: a block computes every `groups`th column tile of its rows, so that passes whose rows
// are all skipped, as passes of prompts are, do not launch thousands of blocks (chosen on H100,
// 2026-11-27).
template <int kRowTile, bool kIsKn, bool kSeveral, Type kType>
struct HeadGemmConfig {
  using Params = HeadGemmParams;
  using Shape = Tiles<kRowTile, kIsKn>;
  // Most GPUs have shared memory for one wide tile only; its registers are then not limited.
  static constexpr bool kFitsTwice = __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000;
  static constexpr int kThreads = Shape::kWarps * 32;
  // As many small tiles as 192 KB of shared memory hold, with 64 registers a thread.
  static constexpr int kByBytes = (192 << 10) / Shape::kSharedBytes;
  static constexpr int kByThreads = 1024 / kThreads;
  static constexpr int kFewPerSm = kByBytes < kByThreads ? kByBytes : kByThreads;
  static constexpr int kBlocksPerSm = Shape::kFewRows ? kFewPerSm : kFitsTwice ? 2 : 1;
  static constexpr KernelTraits kTraits = {kThreads, Shape::kSharedBytes, kRowTile,
                                           Shape::kColumnTile};

  __device__ static int column_tiles(const Params& params) {
    return (params.n + Shape::kColumnTile - 1) / Shape::kColumnTile;
  }
  // Points `tile` to the `number`th of all heads' column tiles.
  __device__ static void place(const Params& params, int number, HeadTile& tile) {
    tile.head = number / column_tiles(params);
    tile.column = (number - tile.head * column_tiles(params)) * Shape::kColumnTile;
    tile.x = static_cast<const uint16_t*>(params.x) + tile.row * params.x_token_stride +
             tile.head * params.x_head_stride;
    tile.weight =
        static_cast<const uint16_t*>(params.weight) + tile.head * params.weight_head_stride;
    tile.thread = thread_anew();
  }

  __device__ static uint16_t* stage(int step) {
    extern __shared__ __align__(128) char dynamic_shared[];
    return reinterpret_cast<uint16_t*>(dynamic_shared) +
           step % Shape::kStages * Shape::kStageElements;
  }
  __device__ static int steps(const Params& params) { return (params.k + kDepth - 1) / kDepth; }

  __device__ static void run(const Params& params) {
    HeadTile tile = {};
    tile.row = blockIdx.x % params.row_tiles * kRowTile;
    tile.rows = min(params.tokens - tile.row, kRowTile);
    int number = blockIdx.x / params.row_tiles;
    place(params, number, tile);
    if constexpr (Shape::kFewRows) {
      for (int step = 0; step < min(steps(params), Shape::kAhead); ++step) {
        load_weights<kRowTile, kIsKn>(params, tile, stage(step), step * kDepth);
      }
    }
    wait_and_allow_next();
    const int live = *params.live_tokens - tile.row;
    tile.skip = params.skip ? params.skip + tile.row : nullptr;
    if constexpr (!Shape::kFewRows) {  // few rows are computed before it is known which are live
      tile.rows = min(tile.rows, live);
      if (tile.rows <= 0) return;
      if (tile.skip && !__syncthreads_or(threadIdx.x < kRowTile && tile.has(threadIdx.x))) return;
    }
    while (true) {
      WarpSums<kRowTile, kIsKn> sums = {};
      multiply(params, tile, sums);
      tile.rows = min(tile.rows, live);
      write_sums<kRowTile, kIsKn, kType>(params, tile, sums);
      if constexpr (!kSeveral) return;
      number += params.groups;
      if (number >= params.heads * column_tiles(params)) return;
      place(params, number, tile);
      __syncthreads();  // all stages have been read
    }
  }

  // With few rows the first weights are being loaded already.
  __device__ static void multiply(const Params& params, const HeadTile& tile,
                                  WarpSums<kRowTile, kIsKn>& sums) {
    const int end = steps(params);
    for (int step = 0; step < Shape::kAhead; ++step) {
      if (step < end) {
        load_rows<kRowTile, kIsKn>(params, tile, stage(step), step * kDepth);
        if (!Shape::kFewRows)
          load_weights<kRowTile, kIsKn>(params, tile, stage(step), step * kDepth);
      }
      commit_copies();
    }
    if (Shape::kFewRows && end <= Shape::kStages) {
      multiply_steps<false>(params, tile, end, sums);
    } else {
      multiply_steps<true>(params, tile, end, sums);
    }
  }

  // kRefills: there are more steps than stages.
  template <bool kRefills>
  __device__ __forceinline__ static void multiply_steps(const Params& params, const HeadTile& tile,
                                                        int end, WarpSums<kRowTile, kIsKn>& sums) {
    for (int step = 0; step < end; ++step) {
      // Copies started below are one group later than the first ones.
      wait_copies<kRefills ? Shape::kStages - 2 : Shape::kAhead - 1>();
      __syncthreads();
      const int next = step + Shape::kStages - 1;  // takes the stage of the last step
      if (kRefills && (Shape::kAhead < Shape::kStages || step > 0) && next < end) {
        load_rows<kRowTile, kIsKn>(params, tile, stage(next), next * kDepth);
        load_weights<kRowTile, kIsKn>(params, tile, stage(next), next * kDepth);
      }
      commit_copies();
      // Unrolling all four steps would spill registers, in a loop over tiles even two.
      multiply_stage<kRowTile, kIsKn, kType, kSeveral ? 1 : 2>(stage(step), tile.thread, sums);
    }
  }
};

template <int kRowTile, bool kIsKn, bool kSeveral, Type kType>
using Config = HeadGemmConfig<kRowTile, kIsKn, kSeveral, kType>;

}  // namespace fovea::kernels::cuda
