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
  auto& boxes = shared.out[consumer];
  if (stores) wait_stores_read();
  named_barrier_wait(barrier, kWarpgroupThreads);
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % kWarpgroupThreads / 32 * 16 + lane % 16;
#pragma unroll
  for (int j = 0; j < kColumns / 8; j += 2) {
    const float* v = sums + 4 * j;
    const uint32_t piece[4] = {pack<kType>(v[0], v[1]), pack<kType>(v[2], v[3]), pack<kType>(v[4], v[5]),
                               pack<kType>(v[6], v[7])};
    const int chunk = j % 8 + lane / 16;
    store_matrices(&boxes[j / 8][row][(chunk ^ row % 8) * 8], piece);
  }
  fence_async_proxy();
  named_barrier_wait(barrier, kWarpgroupThreads);
  const int first_row = tile.row + consumer * kGroupRows;
  if (!stores || first_row >= live_rows) return;
#pragma unroll
  for (int column = 0; column < kSideColumns; column += kBoxColumns) {
    const int box = column / kBoxColumns;
    store_box(params.keys, boxes[box], column, tile.head, first_row);
    store_box(params.values, boxes[kSideColumns / kBoxColumns + box], column, tile.head, first_row);
  }
  commit_stores();
}

}  // namespace fovea::kernels::cuda
