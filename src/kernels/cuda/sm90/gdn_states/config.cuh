// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block.
#pragma once

#include "kernels/cuda/common/gdn_params.h"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/ring.cuh"
#include "kernels/cuda/sm90/chunk_common/products.cuh"
#include "kernels/cuda/sm90/chunk_common/progress.cuh"
#include "kernels/cuda/sm90/chunk_common/walk.cuh"

namespace fovea::kernels::cuda {

constexpr int kStages = 3;
constexpr int kStoringWarps = 2;

// A chunk in shared memory.
struct Stage {
  alignas(1024) Tile k[kBoxes];
  Tile q[kBoxes];
  Tile v;
  GdnTerms terms;
};

struct WalkMemory {
  Stage stages[kStages];
  Handover<Tile[kBoxes]> state;  // before the chunk: rows of values
  Handover<Tile> values;         // new values: rows of values, columns of tokens
  Handover<OutputTile> out;
  TransactionBarrier full[kStages], empty[kStages];
};

}  // namespace fovea::kernels::cuda
