// SPDX-License-Identifier: Apache-2.0
// The producer: loads stages of rows and weights through the copy engine.
#pragma once

#include "kernels/cuda/sm90/head_gemm/config.cuh"

namespace fovea::kernels::cuda {

// The producer's only thread.
template <int kRows, bool kIsKn>
struct Producer {
  using Shape = Tiles<kRows, kIsKn>;

  const HopperHeadGemmParams& params;
  typename Shape::SharedMemory& shared;

  // A stage of one of the block's tiles.
  struct Step {
    Tile tile;
    int k = 0;
    Ring<Shape::kStages> ring;

    __device__ __forceinline__ explicit Step(const HopperHeadGemmParams& params) : tile(params) {}
    __device__ __forceinline__ void advance(const HopperHeadGemmParams& params) {
      ring.advance();
      k += kDepth;
      if (k < params.k) return;
      k = 0;
      tile.advance(params);
    }
    // Returns whether the step is one of the first ones, which fill all stages once.
    __device__ __forceinline__ bool early(const HopperHeadGemmParams& params) const {
      return ring.phase == 0 && tile.template early<Shape::kStages>(params);
    }
  };

  __device__ __forceinline__ void load_weights(const Step& at) const {
    TransactionBarrier& full = shared.full[at.ring.stage];
    full.arrive_expecting(sizeof(typename Shape::Stage));
    auto& to = shared.stages[at.ring.stage].weights;
    if constexpr (kIsKn) {
      load_box(to[0], params.weight, full, at.tile.column, at.k, at.tile.head);
      load_box(to[1], params.weight, full, at.tile.column + kBoxColumns, at.k, at.tile.head);
    } else {
      load_box(to, params.weight, full, at.k, at.tile.column, at.tile.head);
    }
  }
  // `row` is the tile's first.
  __device__ __forceinline__ void load_rows(const Step& at, int row) const {
    load_box(shared.stages[at.ring.stage].rows, params.x, shared.full[at.ring.stage], at.k,
             at.tile.head, row);
  }

  // Loads the first weights before the wait for the preceding kernel.
  __device__ __forceinline__ void load_early_weights() const {
#pragma unroll 1
    for (Step at(params); at.early(params); at.advance(params)) load_weights(at);
  }
  // Loads their rows after it, before it is known which are live. Returns the next step.
  __device__ __forceinline__ Step load_early_rows() const {
    Step at(params);
#pragma unroll 1
    for (; at.early(params); at.advance(params)) load_rows(at, at.tile.row_tile * kRows);
    return at;
  }
  __device__ __forceinline__ void load_others(Step at, int live_row_tiles) const {
#pragma unroll 1
    for (; at.tile.template exists<Shape::kStages>(params, live_row_tiles); at.advance(params)) {
      shared.empty[at.ring.stage].wait(at.ring.phase ^ 1);
      load_weights(at);
      load_rows(at, shared.live.row(params, at.tile.row_tile));
    }
  }
};

}  // namespace fovea::kernels::cuda
