// SPDX-License-Identifier: Apache-2.0
// The producer: stages of latents and weights by the copy engine. The first block of a pair brings the weights of keys
// to both, the second those of values.
#pragma once

#include "kernels/cuda/sm90/mla_project/config.cuh"

namespace fovea::kernels::cuda {

// One thread.
__device__ __forceinline__ void produce(const MlaProjectParams& params, SharedMemory& shared, int first, int tiles,
                                        int pairs) {
  const int side = cluster_rank();
  const TensorMap& weights = side == 0 ? params.w_uk : params.w_uv;
  Ring ring;
  for (int n = first; n < tiles; n += pairs) {
    const ProjectTile tile = tile_at(params, n);
    for (int k = 0; k < params.rank; k += kDepth) {
      Stage& stage = shared.stages[ring.stage];
      TransactionBarrier& full = shared.full[ring.stage];
      shared.empty[ring.stage].wait(ring.phase ^ 1);
      full.arrive_expecting(sizeof(Stage));
      load_box(stage.latents, params.latents, full, k, tile.row);
      load_box_to_pair(stage.weights[side], weights, full, k, 0, tile.head, 0);
      ring.advance();
    }
  }
}

}  // namespace fovea::kernels::cuda
