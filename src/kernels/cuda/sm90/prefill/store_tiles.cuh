// SPDX-License-Identifier: Apache-2.0
// The producer warp that stores row tiles.
#pragma once

#include "kernels/cuda/sm90/common/staged_rows.cuh"

namespace fovea::kernels::cuda {

// Stores all row tiles of the block. A warp runs it.
template <class Config>
__device__ void store_tiles(const PrefillParams& params, typename Config::SharedMemory& shared) {
  Ring<kTileSlots> slots;
  for (uint32_t phase = 0;; phase ^= 1) {
    shared.tile_full[slots.stage].wait(slots.phase);
    const WorkTile& work = shared.tiles[slots.stage].work;
    if (work.request < 0) return;
    store_tile<Config>(params, shared, work, phase);
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.tile_empty[slots.stage].arrive();
    slots.advance();
  }
}

}  // namespace fovea::kernels::cuda
