// SPDX-License-Identifier: Apache-2.0
// MLA's up-projection: keys and values of every head from latents. Blocks, or pairs of them, are
// persistent; the number of rows is known only on the device.
//
//   warp 8 (8-11)   producer | L, half of W[k] | ... of the next tile while this one is stored
//   warpgroups 0-1  64 rows  |                 | L W^T[k] | staged | stored by the copy engine
//
// Barriers: full (producers and the pair's copies -> all), empty (8 warps of each block ->
// producer).
#pragma once

#include "kernels/cuda/sm90/mla_project/epilogue.cuh"
#include "kernels/cuda/sm90/mla_project/load.cuh"
#include "kernels/cuda/sm90/mla_project/mainloop.cuh"

namespace fovea::kernels::cuda {

template <Type kElements, bool kRowsAnywhere, Tile kTile>
__device__ void MlaProjectConfig<kElements, kRowsAnywhere, kTile>::run(
    const MlaProjectParams& params) {
  using Config = MlaProjectConfig;
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
  const int consumer = threadIdx.x / kWarpgroupThreads;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      shared.full[i].init(1 + (kGathers ? kWarpgroupThreads : 0));
      shared.empty[i].init(kBlocks * kConsumers * 4);
    }
    fence_barrier_init();
  }
  if (threadIdx.x == kConsumers * kWarpgroupThreads) {
    if constexpr (!kGathers) prefetch_tensor_map(params.latents);
    prefetch_tensor_map(params.w_uk);
    prefetch_tensor_map(params.w_uv);
    prefetch_tensor_map(params.keys);
    prefetch_tensor_map(params.values);
  }
  sync_blocks<Config>();
  wait_and_allow_next();
  const int first = blockIdx.x / kBlocks;
  const int clusters = gridDim.x / kBlocks;
  if (consumer == kConsumers) {
    if constexpr (kGathers) {
      gather<Config>(params, shared, first, clusters);
    } else {
      if (threadIdx.x % 32 == 0) produce<Config>(params, shared, first, clusters);
      __syncwarp();
    }
  } else {
    Ring<kStages> ring;
    const auto [rows, tiles] = live_tiles<Config>(params);
    for (int n = first; n < tiles; n += clusters) {
      const ProjectTile tile = tile_at<Config>(params, n);
      if (tile.row + consumer * kGroupRows >= rows) {
        skip_tile<Config>(params, shared, ring);
        continue;
      }
      float sums[kColumns / 2];
      multiply<Config>(params, shared, consumer, ring, sums);
      store<Config>(params, shared, consumer, tile, sums);
    }
    if (threadIdx.x % kWarpgroupThreads == 0) wait_stores_read();
  }
  sync_blocks<Config>();  // the other block may still load weights here and release stages
}

template <Type kElements, bool kRowsAnywhere, Tile kTile>
using Config = MlaProjectConfig<kElements, kRowsAnywhere, kTile>;

}  // namespace fovea::kernels::cuda
