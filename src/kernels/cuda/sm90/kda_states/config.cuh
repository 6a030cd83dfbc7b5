// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block.
#pragma once

#include "kernels/cuda/common/kda_params.h"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/ring.cuh"
#include "kernels/cuda/sm90/chunk_common/products.cuh"
#include "kernels/cuda/sm90/chunk_common/walk.cuh"

namespace fovea::kernels::cuda {

constexpr int kKeyStages = 3, kQueryStages = 2;

// The part of a chunk that the warpgroup of states takes. Copies end with the decays.
struct KeyStage {
  KdaKeyTerms terms;
  Tile v;
};
constexpr int kKeyBytes = 2 * sizeof(KdaRows) + sizeof(Tile) + kKeyDim * sizeof(float);

struct WalkMemory {
  alignas(1024) KeyStage keys[kKeyStages];
  KdaQueryTerms queries[kQueryStages];  // the part of the warpgroup of outputs
  Handover<Tile[kBoxes]> state;         // before the chunk: rows of values
  Handover<Tile> values;                // new values: rows of values, columns of tokens
  // Copies -> warps -> producers.
  TransactionBarrier keys_full[kKeyStages], keys_empty[kKeyStages];
  TransactionBarrier queries_full[kQueryStages], queries_empty[kQueryStages];
};

}  // namespace fovea::kernels::cuda
