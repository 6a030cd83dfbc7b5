// SPDX-License-Identifier: Apache-2.0
// Stores sums as keys and values: in boxes of 64 rows and columns, through the copy engine.
#pragma once

#include "kernels/cuda/sm90/mla_project/config.cuh"

namespace fovea::kernels::cuda {

// One consumer warpgroup. Nothing is written outside of the tensors' rows and columns.
template <class Config>
__device__ __forceinline__ void store(const MlaProjectParams& params,
                                      typename Config::SharedMemory& shared, int consumer,
                                      const ProjectTile& tile,
                                      const float (&sums)[Config::kColumns / 2]) {
  const int barrier = first_consumer + consumer;
  const bool stores = threadIdx.x % kWarpgroupThreads == 0;
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % kWarpgroupThreads / 32 * 16 + lane % 16;
#pragma unroll
  for (int b = 0; b < Config::kColumns / kBoxColumns; ++b) {
    auto& box = shared.out[consumer][b % kOutBoxes];
    if (stores) wait_stores_read<kOutBoxes - 1>();
    named_barrier_wait(barrier, kWarpgroupThreads);
#pragma unroll
    for (int j = 0; j < kBoxColumns / 8; j += 2) {
      const float* v = sums + 4 * (b * kBoxColumns / 8 + j);
      uint32_t piece[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) piece[i] = pack<Config::kType>(v[2 * i], v[2 * i + 1]);
      store_matrices(&box[row][((j + lane / 16) ^ row % 8) * 8], piece);
    }
    fence_async_proxy();
    named_barrier_wait(barrier, kWarpgroupThreads);
    if (stores) {
      const int column = b * kBoxColumns;
      const bool is_v = tile.side + column / kSideColumns == 1;
      store_box(is_v ? params.values : params.keys, box, column % kSideColumns, tile.head,
                tile.row + consumer * kGroupRows);
      commit_stores();
    }
  }
}

}  // namespace fovea::kernels::cuda
