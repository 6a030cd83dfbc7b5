// SPDX-License-Identifier: Apache-2.0
// Shared memory of a worker: one chunk of one key head, and the terms of one of its value heads.
#pragma once

#include "kernels/cuda/common/gdn_params.h"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/scan.cuh"
#include "kernels/cuda/sm90/chunk_common/solve.cuh"

namespace fovea::kernels::cuda {

struct ChunkMemory {
  alignas(1024) Tile k[kBoxes];
  Tile q[kBoxes];
  GdnTerms terms;
  Tile solve_low;  // terms.solve is rounded; the remainders
  Triangle triangles[kTriangles];
  float log_decays[kGdnMaxShare][kChunkTokens], gates[kGdnMaxShare][kChunkTokens];  // as loaded
  float betas[kGdnMaxShare][kChunkTokens];
  // log2 of the product of decays up to each token; plus and minus log2 of the key's factor.
  float decays[kGdnMaxShare][kChunkTokens], rows[kGdnMaxShare][kChunkTokens],
      columns[kGdnMaxShare][kChunkTokens];
  float k_scale[kChunkTokens], q_scale[kChunkTokens];
  int stored;  // the chunk of the last terms; -1: none
  TransactionBarrier full;
};

struct BlockMemory {
  ChunkMemory workers[kWorkers];
  WorkerTasks tasks;
};

// A chunk and one key head of it.
struct Task {
  ChunkSpan chunk;
  int number, key_head;

  __device__ __forceinline__ Task(const GdnPrefillParams& params, int task)
      : number(task / params.key_heads), key_head(task % params.key_heads) {
    chunk = params.plan.chunks[number];
  }
};

}  // namespace fovea::kernels::cuda
