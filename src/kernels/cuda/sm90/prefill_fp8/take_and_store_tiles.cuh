// SPDX-License-Identifier: Apache-2.0
// The producer warp that takes row tiles and stores those that are done.
#pragma once

#include "kernels/cuda/sm90/common/copy_tiles.cuh"
#include "kernels/cuda/sm90/common/staged_rows.cuh"

namespace fovea::kernels::cuda {

// Does what take_tiles() does, and stores all row tiles: when there is room for a tile's queries,
// the rows of the tile two before are about to be staged. A warp runs it.
template <class Config>
__device__ void take_and_store_tiles(const PrefillParams& params,
                                     typename Config::SharedMemory& shared) {
  static_assert(Config::kQueryStages == 2 && kTileSlots > Config::kQueryStages);
  TileTaker<Config> taker{params, shared};
  Ring<Config::kQueryStages> q;
  int taken = 0;
  const auto store = [&](int tile) {
    store_tile<Config>(params, shared, shared.tiles[tile % kTileSlots].work, tile % 2);
    __syncwarp();
  };
  for (;; ++taken) {
    const WorkTile& tile = taker.take();
    if (tile.request < 0) break;
    taker.claim_next();
    load_queries_boxes<Config>(params, shared, tile, q);
    if (taken >= 2) store(taken - 2);
  }
  for (int tile = max(taken - 2, 0); tile < taken; ++tile) store(tile);
  taker.finish();
}

}  // namespace fovea::kernels::cuda
