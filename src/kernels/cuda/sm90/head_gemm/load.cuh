// SPDX-License-Identifier: Apache-2.0
// The producer: stages of rows and weights by the copy engine.
#pragma once

#include "kernels/cuda/sm90/head_gemm/config.cuh"

namespace fovea::kernels::cuda {

template <int kRows, bool kIsKn>
struct Producer {
  using Shape = Tiles<kRows, kIsKn>;
  using Stage = typename Shape::Stage;

  const HopperHeadGemmParams& params;
  typename Shape::SharedMemory& shared;

  __device__ __forceinline__ Tile tile(int n) const {
    return tile_at<kRows>(params, static_cast<int>(blockIdx.x + n * gridDim.x));
  }
  __device__ __forceinline__ void load_weights(int stage, const Tile& tile, int k) const {
    TransactionBarrier& full = shared.full[stage];
    full.arrive_expecting(sizeof(Stage));
    auto& to = shared.stages[stage].weights;
    if constexpr (kIsKn) {
      load_box(to[0], params.weight, full, tile.column, k, tile.head);
      load_box(to[1], params.weight, full, tile.column + kBoxColumns, k, tile.head);
    } else {
      load_box(to, params.weight, full, k, tile.column, tile.head);
    }
  }

  // One thread, before it waits for the kernel ahead: weights for as many stages as there are. Returns how many.
  __device__ __forceinline__ int begin(int tiles) const {
    int stage = 0;
    for (int n = 0; n < tiles; ++n) {
      for (int k = 0; k < params.k; k += kDepth) {
        if (stage == Shape::kStages) return stage;
        load_weights(stage++, tile(n), k);
      }
    }
    return stage;
  }

  // The same thread, behind the wait.
  __device__ __forceinline__ void run(int tiles, int early) const {
    Ring<Shape::kStages> ring;
    for (int n = 0; n < tiles; ++n) {
      const Tile tile = this->tile(n);
      for (int k = 0; k < params.k; k += kDepth, --early) {
        if (early <= 0) {
          shared.empty[ring.stage].wait(ring.phase ^ 1);
          load_weights(ring.stage, tile, k);
        }
        load_box(shared.stages[ring.stage].rows, params.x, shared.full[ring.stage], k, tile.head, tile.row);
        ring.advance();
      }
    }
  }
};

}  // namespace fovea::kernels::cuda
