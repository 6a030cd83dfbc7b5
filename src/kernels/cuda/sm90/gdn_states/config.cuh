// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block.
#pragma once

#include "kernels/cuda/common/gdn_params.h"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/ring.cuh"
#include "kernels/cuda/sm90/chunk_common/segments.cuh"

namespace fovea::kernels::cuda {

constexpr int kStages = 3;
constexpr int kStoringWarps = 2;

// A chunk in shared memory.
struct Stage {
  alignas(1024) Tile k[kBoxes];
  Tile q[kBoxes];
  Tile v;
  GdnTerms terms;

  // The keys' and queries' place, for the matrix of a segment.
  __device__ __forceinline__ SegmentMatrix& matrix() { return reinterpret_cast<SegmentMatrix&>(k); }
};
static_assert(sizeof(Stage::k) + sizeof(Stage::q) == sizeof(SegmentMatrix));

struct WalkMemory {
  Stage stages[kStages];
  Handover<Tile[kBoxes]> state;  // before the chunk: rows of values
  Handover<Tile> values;         // new values: rows of values, columns of tokens
  Handover<OutputTile> out;
  TransactionBarrier full[kStages], empty[kStages];
  BlockTasks tasks;

  __device__ __forceinline__ EffectRing<Stage, kStages> effects(Ring<kStages>& at) {
    return {stages, full, empty, at};
  }
};

}  // namespace fovea::kernels::cuda
