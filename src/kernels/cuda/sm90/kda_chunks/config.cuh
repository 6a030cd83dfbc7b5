// SPDX-License-Identifier: Apache-2.0
// Shared memory of a worker: what its warps exchange about one chunk of one value head.
#pragma once

#include "kernels/cuda/common/kda_params.h"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/sm90/chunk_common/solve.cuh"

namespace fovea::kernels::cuda {

// A lane has rows of two tokens, row and row + 8 of its warp's 16, and 8 neighbouring columns of
// each 32. These are the operands of two products over 16 columns: words 0 and 1, then 2 and 3.
constexpr int kGroups = kKeyDim / 32;

// Rows of a warp's 16 tokens as its lanes have them: [group][half][lane].
using LaneRows = uint4[kGroups][2][32];

// Decays of columns before and after each warp's tokens.
struct ColumnDecays {
  float before[kTriangles][kKeyDim], after[kTriangles][kKeyDim];
};

struct ChunkMemory {
  alignas(1024) Tile solve;
  Tile solve_low;  // solve is rounded; the remainders
  Tile scores;
  // Keys and queries as loaded, then times the decays from the begin of their warp's tokens, and
  // keys times the decays to their end. A lane reads what the lane of the same number has stored.
  LaneRows keys[kTriangles], queries[kTriangles];
  union {
    float sums[kTriangles][kKeyDim];  // log decays of a warp's tokens, until `decays` is there
    LaneRows earlier[kTriangles - 1];
  };
  union {
    ColumnDecays decays;  // until all warps have multiplied their own tokens
    Triangle triangles[kTriangles];
  };
  uint16_t across[kTriangles - 2][kKeyDim];  // decays of the tokens of warps 1 and 2 in f16
  float betas[kChunkTokens];
  float key_factors[kChunkTokens], query_factors[kChunkTokens];  // norms that operands lack
  int stored;  // the chunk of the last terms; -1: none
};

struct BlockMemory {
  ChunkMemory workers[kWorkers];
  WorkerTasks tasks;
};

// A chunk and one value head of it. Heads of a chunk follow one another, as in memory.
struct Task {
  ChunkSpan chunk;
  int number, head;

  __device__ __forceinline__ Task(const KdaPrefillParams& params, int task)
      : number(task / params.value_heads), head(task % params.value_heads) {
    chunk = params.plan.chunks[number];
  }
};

// Returns a lane's first column in the 32 columns of a group.
__device__ __forceinline__ int first_column(const Place& place) { return place.lane % 4 * 8; }

}  // namespace fovea::kernels::cuda
