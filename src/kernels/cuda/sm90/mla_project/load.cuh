// SPDX-License-Identifier: Apache-2.0
// The producer: stages of latents and weights by the copy engine.
#pragma once

#include "kernels/cuda/sm90/mla_project/config.cuh"

namespace fovea::kernels::cuda {

// One thread.
__device__ __forceinline__ void produce(const MlaProjectParams& params, SharedMemory& shared,
                                        int tiles) {
  Ring ring;
  for (int n = blockIdx.x; n < tiles; n += gridDim.x) {
    const ProjectTile tile = tile_at(params, n);
    for (int k = 0; k < params.rank; k += kDepth) {
      Stage& stage = shared.stages[ring.stage];
      TransactionBarrier& full = shared.full[ring.stage];
      shared.empty[ring.stage].wait(ring.phase ^ 1);
      full.arrive_expecting(sizeof(Stage));
      load_box(stage.latents, params.latents, full, k, tile.row);
      load_box(stage.weights[0], params.w_uk, full, k, 0, tile.head);
      load_box(stage.weights[1], params.w_uv, full, k, 0, tile.head);
      ring.advance();
    }
  }
}

}  // namespace fovea::kernels::cuda
