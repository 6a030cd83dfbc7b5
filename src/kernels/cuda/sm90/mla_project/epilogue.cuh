// SPDX-License-Identifier: Apache-2.0
// Sums to keys and values: staged as boxes of 64 rows and columns, which the copy engine stores.
#pragma once

#include "kernels/cuda/sm90/mla_project/config.cuh"

namespace fovea::kernels::cuda {

// A consumer. Nothing is written behind the tensors' rows and columns, nor where all rows lie behind the live ones.
template <Type kType>
__device__ __forceinline__ void store(const MlaProjectParams& params, SharedMemory& shared, int consumer,
                                      const ProjectTile& tile, int live_rows, const float (&sums)[kColumns / 2]) {
  const int barrier = 1 + consumer;
  const bool stores = threadIdx.x % kWarpgroupThreads == 0;
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % kWarpgroupThreads / 32 * 16 + lane % 16;
  const int first_row = tile.row + consumer * kGroupRows;
#pragma unroll
  for (int b = 0; b < kColumns / kBoxColumns; ++b) {
    auto& box = shared.out[consumer][b % kOutBoxes];
    if (stores) wait_stores_read<kOutBoxes - 1>();
    named_barrier_wait(barrier, kWarpgroupThreads);
#pragma unroll
    for (int j = 0; j < kBoxColumns / 8; j += 2) {
      const float* v = sums + 4 * (b * kBoxColumns / 8 + j);
      const uint32_t piece[4] = {pack<kType>(v[0], v[1]), pack<kType>(v[2], v[3]), pack<kType>(v[4], v[5]),
                                 pack<kType>(v[6], v[7])};
      store_matrices(&box[row][((j + lane / 16) ^ row % 8) * 8], piece);
    }
    fence_async_proxy();
    named_barrier_wait(barrier, kWarpgroupThreads);
    if (stores && first_row < live_rows) {
      const int column = b * kBoxColumns;
      const bool is_v = column >= kSideColumns;
      store_box(is_v ? params.values : params.keys, box, column % kSideColumns, tile.head, first_row);
    }
    if (stores) commit_stores();
  }
}

}  // namespace fovea::kernels::cuda
