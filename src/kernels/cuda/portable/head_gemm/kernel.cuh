// SPDX-License-Identifier: Apache-2.0
// Every head's rows times its own matrix. How many tokens there are is known on the device only:
// the grid covers the most there can be, and CTAs without rows leave at once.
//
//   x -------cp.async--> [stage 0|1|...] --ldmatrix--> mma.sync --> out
//   weights -cp.async-->
//
// For few rows weights, which no kernel of a pass writes, are asked for before the wait for the
// kernel ahead: 16 heads with their decode at 1x1k 16.1 to 12.5 us, 128 heads 21.0 to 18.6 (H100,
// 2026-11-27).
#pragma once

#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/portable/head_gemm/epilogue.cuh"

namespace fovea::kernels::cuda {

// kSeveral: of its rows' tiles a CTA takes every `groups`th. Where all of them are to be skipped,
// as in a pass of prompts, 8192 CTAs of a tile each took 18 us (16 heads, 8x2k), and 128 heads have
// eight times as many: 4x4k from latents 5095 to 4882 us (H100, 2026-11-27).
template <int kRowTile, bool kIsKn, bool kSeveral, Type kType>
struct HeadGemmConfig {
  using Params = HeadGemmParams;
  using Shape = Tiles<kRowTile, kIsKn>;
  // One wide tile is all that fits into the shared memory of most GPUs: no limit on its registers
  // then.
  static constexpr bool kFitsTwice = __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000;
  static constexpr int kThreads = Shape::kWarps * 32;
  // As many small ones as 192 KB of shared memory hold, with 64 registers a thread.
  static constexpr int kByBytes = (192 << 10) / Shape::kSharedBytes;
  static constexpr int kByThreads = 1024 / kThreads;
  static constexpr int kFewPerSm = kByBytes < kByThreads ? kByBytes : kByThreads;
  static constexpr int kBlocksPerSm = Shape::kFewRows ? kFewPerSm : kFitsTwice ? 2 : 1;
  static constexpr KernelTraits kTraits = {kThreads, Shape::kSharedBytes, kRowTile,
                                           Shape::kColumnTile};

  __device__ static int column_tiles(const Params& params) {
    return (params.n + Shape::kColumnTile - 1) / Shape::kColumnTile;
  }
  // The `number`th of the heads' column tiles.
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
    if constexpr (!Shape::kFewRows) {  // few rows do not wait to know which are alive
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

  // Of few rows the first weights are on their way.
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
      // What is asked for below is a group later than what was at first.
      wait_copies<kRefills ? Shape::kStages - 2 : Shape::kAhead - 1>();
      __syncthreads();
      const int next = step + Shape::kStages - 1;  // in the place of the last step
      if (kRefills && (Shape::kAhead < Shape::kStages || step > 0) && next < end) {
        load_rows<kRowTile, kIsKn>(params, tile, stage(next), next * kDepth);
        load_weights<kRowTile, kIsKn>(params, tile, stage(next), next * kDepth);
      }
      commit_copies();
      // All four steps spill registers, more than one does in a loop over tiles.
      multiply_stage<kRowTile, kIsKn, kType, kSeveral ? 1 : 2>(stage(step), tile.thread, sums);
    }
  }
};

template <int kRowTile, bool kIsKn, bool kSeveral, Type kType>
using Config = HeadGemmConfig<kRowTile, kIsKn, kSeveral, kType>;

}  // namespace fovea::kernels::cuda
