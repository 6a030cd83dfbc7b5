// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block.
#pragma once

#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/ring.cuh"
#include "kernels/cuda/common/scan.cuh"
#include "kernels/cuda/common/ssd_params.h"
#include "kernels/cuda/sm90/chunk_common/products.cuh"
#include "kernels/cuda/sm90/chunk_common/walk.cuh"

namespace fovea::kernels::cuda {

constexpr int kStages = 4;

// The factors of the tokens of a chunk. decays are log2 of the product up to each token.
struct SsdFactors {
  float decays[kChunkTokens], strengths[kChunkTokens];
  float read[kChunkTokens];  // times the state before the chunk: its part in each token's output
  float keep[kChunkTokens];  // times each token's value: its part in the next state
  float decay;               // times the state: its part in the next one
};

// A chunk in shared memory.
struct SsdStage {
  alignas(1024) Tile k[kBoxes];
  Tile q[kBoxes];
  Tile v;
  SsdFactors factors;
};

struct SsdMemory {
  SsdStage stages[kStages];
  Handover<Tile[kBoxes]> state;  // before the chunk: rows of values
  alignas(16) OutputTile out;    // 16 rows a warp
  TransactionBarrier full[kStages], empty[kStages];
};

}  // namespace fovea::kernels::cuda
