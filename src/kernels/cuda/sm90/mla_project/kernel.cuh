// SPDX-License-Identifier: Apache-2.0
// MLA's up-projection: keys and values of every head from latents. Persistent blocks; how many rows
// there are is known on the device only.
//
//   warp 8         producer   | L, Wk, Wv [k] | ... of the next tile while this one is stored
//   warpgroups 0-1 64 rows:   | L Wk^T, L Wv^T  [k], one step ahead of the wait | store |
//
// Barriers: full (producer -> all), empty (8 warps -> producer).
#pragma once

#include "kernels/cuda/sm90/mla_project/epilogue.cuh"
#include "kernels/cuda/sm90/mla_project/load.cuh"

namespace fovea::kernels::cuda {

template <Type kType>
struct MlaProjectConfig {
  using Params = MlaProjectParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kThreads, sizeof(SharedMemory), kRows, kColumns};
  static_assert(sizeof(SharedMemory) <= 232448);

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        shared.full[i].init(1);
        shared.empty[i].init(kConsumers * 4);
      }
      fence_barrier_init();
    }
    __syncthreads();
    const int rows = min(*params.live_rows, params.rows);
    const int tiles = (rows + kRows - 1) / kRows * params.heads;
    const int consumer = threadIdx.x / kWarpgroupThreads;
    if (consumer == kConsumers) {
      if (threadIdx.x % 32 == 0) produce(params, shared, tiles);
      return;
    }
    Ring ring;
    for (int n = blockIdx.x; n < tiles; n += gridDim.x) {
      const ProjectTile tile = tile_at(params, n);
      Sums sums;
      multiply<kType>(params, shared, consumer, ring, sums);
      const int row = tile.row + consumer * 64;
      store<kType>(sums.of[0],
                   static_cast<uint16_t*>(params.keys) + tile.head * params.keys_head_stride,
                   params.keys_token_stride, params.nope_dim, row, rows);
      store<kType>(sums.of[1],
                   static_cast<uint16_t*>(params.values) + tile.head * params.values_head_stride,
                   params.values_token_stride, params.v_dim, row, rows);
    }
  }
};

template <Type kType>
using Config = MlaProjectConfig<kType>;

}  // namespace fovea::kernels::cuda
