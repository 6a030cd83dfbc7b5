// SPDX-License-Identifier: Apache-2.0
// Tiles of MLA's up-projection. 128 rows of latents by a head's keys and values: 384 KB of operands for
// 33.5 MFLOP, 7 TB/s out of the L2 cache at 600 TFLOP/s; a tile of keys alone would want 9.
#pragma once

#include "kernels/cuda/common/hopper.cuh"
#include "kernels/cuda/common/mla_project_params.h"
#include "kernels/cuda/common/wgmma.cuh"

namespace fovea::kernels::cuda {

constexpr int kRows = 128;     // of latents: two warpgroups of 64
constexpr int kColumns = 128;  // of keys, and of values
constexpr int kDepth = 64;     // of the rank in a stage: rows of 128 bytes
constexpr int kStages = 4;     // 48 KB each
constexpr int kConsumers = 2;
constexpr int kThreads = kConsumers * kWarpgroupThreads + 32;  // and a producer warp

struct Stage {
  uint16_t latents[kRows][kDepth];
  uint16_t weights[2][kColumns][kDepth];
};

struct SharedMemory {
  alignas(1024) Stage stages[kStages];
  TransactionBarrier full[kStages], empty[kStages];
};

// Position in the ring; full barriers are waited on with `phase`, empty ones with the other.
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Tiles stand row tile by row tile, heads side by side; block b takes every gridDim.x-th from b on.
struct ProjectTile {
  int row, head;
};
__device__ __forceinline__ ProjectTile tile_at(const MlaProjectParams& params, int n) {
  return {n / params.heads * kRows, n % params.heads};
}

}  // namespace fovea::kernels::cuda
