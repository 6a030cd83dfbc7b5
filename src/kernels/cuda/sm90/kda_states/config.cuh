// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block.
#pragma once

#include "kernels/cuda/common/kda_params.h"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/ring.cuh"
#include "kernels/cuda/sm90/chunk_common/segments.cuh"

namespace fovea::kernels::cuda {

constexpr int kKeyStages = 3, kQueryStages = 2;
constexpr int kStoringWarps = 2;

// The part of a chunk that the warpgroup of states takes. Copies end with the decays.
struct KeyStage {
  KdaKeyTerms terms;
  Tile v;

  // The place of the rows of keys, for the matrix of a segment.
  __device__ __forceinline__ SegmentMatrix& matrix() {
    return reinterpret_cast<SegmentMatrix&>(terms);
  }
};
static_assert(2 * sizeof(KdaRows) == sizeof(SegmentMatrix));
constexpr int kKeyBytes = 2 * sizeof(KdaRows) + sizeof(Tile) + kKeyDim * sizeof(float);

// The part of the warpgroup of outputs, which then keeps its results there.
union QueryStage {
  KdaQueryTerms terms;
  OutputTile out;
};

struct WalkMemory {
  alignas(1024) KeyStage keys[kKeyStages];
  QueryStage queries[kQueryStages];
  Handover<Tile[kBoxes]> state;  // before the chunk: rows of values
  Handover<Tile> values;         // new values: rows of values, columns of tokens
  // Copies -> warps -> producers.
  TransactionBarrier keys_full[kKeyStages], keys_empty[kKeyStages];
  TransactionBarrier queries_full[kQueryStages], queries_empty[kQueryStages];
  TransactionBarrier outputs_full[kQueryStages];  // warps -> warps that store
  BlockTasks tasks;

  __device__ __forceinline__ EffectRing<KeyStage, kKeyStages> effects(Ring<kKeyStages>& at) {
    return {keys, keys_full, keys_empty, at};
  }
};

}  // namespace fovea::kernels::cuda
