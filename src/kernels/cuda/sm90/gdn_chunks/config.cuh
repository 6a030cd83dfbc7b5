// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block: one chunk of one key head, and the terms of one of its value heads.
#pragma once

#include "kernels/cuda/common/gdn_params.h"
#include "kernels/cuda/common/hopper.cuh"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/scan.cuh"
#include "kernels/cuda/common/wgmma.cuh"

namespace fovea::kernels::cuda {

constexpr int kBoxes = kGdnDim / kGdnBoxWidth;  // boxes side by side of a head's keys
constexpr int kTriangle = 16;                   // rows of a diagonal block
constexpr int kTriangles = kGdnChunk / kTriangle;
constexpr int kPaddedTriangle = kTriangle + 4;  // so that columns begin in different banks

using Tile = uint16_t[kGdnChunk][kGdnBoxWidth];

struct ChunkMemory {
  alignas(1024) Tile k[kBoxes];
  Tile q[kBoxes];
  GdnTerms terms;
  Tile solve_low;                                          // terms.solve is rounded; the remainders
  float triangle[kTriangles][kTriangle][kPaddedTriangle];  // by columns
  float log_decays[kGdnMaxShare][kGdnChunk], gates[kGdnMaxShare][kGdnChunk];  // as loaded
  float betas[kGdnMaxShare][kGdnChunk];
  // log2 of the product of decays up to each token; plus and minus log2 of the key's factor.
  float decays[kGdnMaxShare][kGdnChunk], rows[kGdnMaxShare][kGdnChunk],
      columns[kGdnMaxShare][kGdnChunk];
  float k_scale[kGdnChunk], q_scale[kGdnChunk];
  int chunks;  // chunks of the batch
  TransactionBarrier full;
};

// A chunk and one key head of it.
struct Task {
  GdnChunk chunk;
  int number, key_head;

  // `chunks` counts the chunks of the batch.
  __device__ __forceinline__ Task(const GdnPrefillParams& params, int task, int chunks)
      : number(task % chunks), key_head(task / chunks) {
    chunk = params.plan.chunks[number];
  }
};

// The place of a thread in matrices of 64 rows, 16 a warp.
struct Place {
  int thread = thread_anew();
  int warp = thread / 32, lane = thread % 32;
  int row = warp * 16 + lane / 4;  // and row + 8
  int column = lane % 4 * 2;       // and the next one, in every 8 columns
};

// Returns the address of 8 values in swizzled rows of 128 bytes.
__device__ __forceinline__ uint16_t* swizzled(Tile& tile, int row, int chunk) {
  return &tile[row][(chunk ^ row % 8) * 8];
}

}  // namespace fovea::kernels::cuda
