// SPDX-License-Identifier: Apache-2.0
// Tiles of products of 9 to 64 rows.
#pragma once

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/hopper.cuh"
#include "kernels/cuda/common/narrow_gemm_params.h"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/product_outputs.cuh"
#include "kernels/cuda/common/ring.cuh"
#include "kernels/cuda/common/wgmma.cuh"

namespace fovea::kernels::cuda {

constexpr int kBoxDepth = 64;  // values of k in a box: rows of 128 bytes
constexpr int kDepth = 128;    // values of k in a stage
constexpr int kStageBoxes = kDepth / kBoxDepth;
constexpr int kGroupColumns = 64;  // rows of the weight that a warpgroup multiplies
constexpr int kMaxSplits = 2;      // blocks that share k
static_assert(kDepth == kNarrowDepth);

// Named barriers.
enum NamedBarrier : int { consumers = 1 };

// A tile is `kGroups` times 64 rows of the weight by kRows rows of x.
template <int kRows, int kGroups>
struct NarrowTiles {
  static constexpr int kColumns = kGroups * kGroupColumns;
  static constexpr int kConsumers = kGroups * kWarpgroupThreads;
  static constexpr int kThreads = kConsumers + 32;  // with a producer warp

  struct Stage {
    uint16_t weight[kStageBoxes][kColumns][kBoxDepth];
    uint16_t x[kStageBoxes][kRows][kBoxDepth];
  };
  // The other block of the cluster sends each thread four sums of every 16 rows. A tile of three
  // warpgroups is never shared.
  static constexpr int kReceived = kGroups < 3 ? kRows / 16 : 0;
  static constexpr int kReceivedBytes = kReceived * kConsumers * sizeof(float4);
  static constexpr int kStages = (kMaxSharedBytes - kReceivedBytes - 1024) / sizeof(Stage);
  // Rows of sums begin in different banks.
  static constexpr int kPitch = kColumns + 4;

  struct SharedMemory {
    union alignas(1024) {
      Stage stages[kStages];
      float sums[kRows][kPitch];  // after the products
    };
    float4 received[kReceived > 0 ? kReceived : 1][kReceived > 0 ? kConsumers : 1];
    TransactionBarrier full[kStages], empty[kStages], has_received;
    float factors[kRows];
  };
  static_assert(sizeof(Stage) % 1024 == 0 && sizeof(Stage::weight) % 1024 == 0);
  static_assert(kPitch * kRows * sizeof(float) <= kStages * sizeof(Stage));
};

// The part of the product that a block computes: a tile, and some steps of its k.
struct Part {
  int tile;
  int rank;  // among the blocks that share the tile
  int first_step, steps;

  __device__ __forceinline__ explicit Part(const NarrowGemmParams& params) {
    const int all = params.product.k / kDepth;
    rank = params.splits > 1 ? cluster_rank() : 0;
    tile = blockIdx.x / params.splits;
    first_step = all * rank / params.splits;
    steps = all * (rank + 1) / params.splits - first_step;
  }
  // Returns the first value of k of the i-th step.
  __device__ __forceinline__ int depth_of(int i) const { return (first_step + i) * kDepth; }
};

}  // namespace fovea::kernels::cuda
