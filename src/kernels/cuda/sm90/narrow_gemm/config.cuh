// SPDX-License-Identifier: Apache-2.0
// Tiles of products of 9 to 128 rows.
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
constexpr int kDepth = 128;    // values of k in a stage of the weight
constexpr int kStageBoxes = kDepth / kBoxDepth;
constexpr int kGroupColumns = 64;  // rows of the weight that a warpgroup multiplies
constexpr int kUnit = 8;           // rows of x that have one float4 of sums in a thread
static_assert(kDepth == kNarrowDepth);

// Named barriers.
enum NamedBarrier : int { consumers = 1 };

// A tile is `kGroups` times 64 rows of the weight by kRows rows of x.
template <int kRows, int kGroups>
struct NarrowTiles {
  static constexpr int kColumns = kGroups * kGroupColumns;
  static constexpr int kConsumers = kGroups * kWarpgroupThreads;
  static constexpr int kThreads = kConsumers + 32;  // with a producer warp

  using Weight = uint16_t[kStageBoxes][kColumns][kBoxDepth];
  using Rows = uint16_t[kRows][kBoxDepth];
  // x comes from the L2 cache and needs less room on its way than the weight. The fewer rows of the
  // weight a block has, the sooner it needs the next box.
  static constexpr int kMinBoxes = kGroups == 1 ? 8 : kGroups == 2 ? 6 : 5;
  static constexpr int kRingBytes = kMaxSharedBytes - 2048;  // the rest are barriers and factors
  static constexpr int kStages = (kRingBytes - kMinBoxes * sizeof(Rows)) / sizeof(Weight);
  static constexpr int kFittingBoxes = (kRingBytes - kStages * sizeof(Weight)) / sizeof(Rows);
  static constexpr int kBoxes =
      kFittingBoxes < kStageBoxes * kStages ? kFittingBoxes : kStageBoxes * kStages;
  struct Stages {
    Weight weight[kStages];
    Rows x[kBoxes];
  };

  // Other blocks of a cluster send each thread their sums of the units of rows that this block
  // stores. They arrive in the first stages, which are never those of the last two steps.
  static constexpr int kUnits = kRows / kUnit;
  static constexpr int kMaxOwnUnits = kUnits / 2;  // for a block that shares its tile
  static constexpr int kMaxSplits = kGroups < 3 ? kMaxNarrowSplits : 2;
  static constexpr int kReceived = (kMaxSplits - 1) * ((kUnits + kMaxSplits - 1) / kMaxSplits);
  // Rows of sums begin in different banks.
  static constexpr int kPitch = kColumns + 4;

  struct SharedMemory {
    union alignas(1024) {
      Stages stages;
      float4 received[kReceived][kConsumers];  // after the products
      float sums[kRows][kPitch];               // after those
    };
    TransactionBarrier weight_full[kStages], x_full[kBoxes], empty[kBoxes], has_received;
    float factors[kRows];
  };
  static_assert(sizeof(Weight) % 1024 == 0 && sizeof(Rows) % 1024 == 0);
  static_assert(sizeof(SharedMemory::received) <= (kStages - 2) * sizeof(Weight));
  static_assert(sizeof(SharedMemory::sums) <= sizeof(Stages));
};

// The part of the product that a block computes: a tile, and some steps of its k.
struct Part {
  int tile;
  int rank, splits;  // among the blocks that share the tile
  int first_step, steps;

  __device__ __forceinline__ explicit Part(const NarrowGemmParams& params) {
    const int all = params.product.k / kDepth;
    splits = params.splits;
    rank = splits > 1 ? cluster_rank() : 0;
    tile = blockIdx.x / splits;
    first_step = all * rank / splits;
    steps = all * (rank + 1) / splits - first_step;
  }
  // Returns the first value of k of a box of the part.
  __device__ __forceinline__ int depth_of(int box) const {
    return first_step * kDepth + box * kBoxDepth;
  }
  // Returns where the i-th step has its weight among `stages`: the last step has the last place.
  __device__ __forceinline__ int place_of(int i, int stages) const {
    return (i + stages - 1 - (steps + stages - 1) % stages) % stages;
  }
};

}  // namespace fovea::kernels::cuda
