// SPDX-License-Identifier: Apache-2.0
// Tiles of MLA's up-projection: 128 rows of latents by a head's keys and values. Blocks in pairs bring each other one
// half of the weights, so a tile of 33.5 MFLOP reads 256 KB out of the L2 cache, 5.2 TB/s at 680 TFLOP/s. Alone it
// would be 384 KB: 7.8 TB/s, more than the L2 gives.
#pragma once

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/mla_project_params.h"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/ring.cuh"
#include "kernels/cuda/common/wgmma.cuh"

namespace fovea::kernels::cuda {

constexpr int kBlocks = 2;     // of a cluster: the same head, neighbouring rows
constexpr int kRows = 128;     // of latents: two warpgroups of 64
constexpr int kSideColumns = 128;  // of keys, and of values
constexpr int kColumns = 2 * kSideColumns;
constexpr int kDepth = 64;     // of the rank in a stage: rows of 128 bytes
constexpr int kStages = 4;     // 48 KB each
constexpr int kConsumers = 2;
constexpr int kGroupRows = kRows / kConsumers;
constexpr int kBoxColumns = 64;  // of staged sums: rows of 128 bytes
constexpr int kOutBoxes = 2;     // of a consumer, by turns
// Beside the consumers a warp that starts copies, or a warpgroup that copies rows one by one.
template <bool kGathers>
constexpr int kProducerThreads = kGathers ? kWarpgroupThreads : 32;

struct Stage {
  uint16_t latents[kRows][kDepth];
  uint16_t weights[2][kSideColumns][kDepth];  // of keys and of values, one b operand of 256 columns
};

struct SharedMemory {
  alignas(1024) Stage stages[kStages];
  alignas(1024) uint16_t out[kConsumers][kOutBoxes][kGroupRows][kBoxColumns];
  TransactionBarrier full[kStages], empty[kStages];
};

// A pair's tiles stand row tile by row tile, heads side by side; pair p takes every pairs-th from p on.
struct ProjectTile {
  int row, head;  // of this block
};
__device__ __forceinline__ ProjectTile tile_at(const MlaProjectParams& params, int n) {
  return {(n / params.heads * kBlocks + cluster_rank()) * kRows, n % params.heads};
}

// Whether the rotary keys of the tile's rows are copied with it: once for all heads, by every pair its share.
__device__ __forceinline__ bool brings_rotary(const MlaProjectParams& params, int n) {
  return n % params.heads == n / params.heads % params.heads;
}

}  // namespace fovea::kernels::cuda
