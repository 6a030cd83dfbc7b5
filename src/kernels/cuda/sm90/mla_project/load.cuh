// SPDX-License-Identifier: Apache-2.0
// The producer: stages of weights by the copy engine, of latents by it or row by row. The first block of a pair brings
// the weights of keys to both, the second those of values.
#pragma once

#include "kernels/cuda/sm90/mla_project/config.cuh"

namespace fovea::kernels::cuda {

// One thread: this block's half of the weights of a step, to both blocks.
__device__ __forceinline__ void load_weights(const MlaProjectParams& params, SharedMemory& shared, int stage, int k,
                                             int head) {
  const int side = cluster_rank();
  load_box_to_pair(shared.stages[stage].weights[side], side == 0 ? params.w_uk : params.w_uv, shared.full[stage], k, 0,
                   head, 0);
}

// One thread, rows in boxes.
__device__ __forceinline__ void produce(const MlaProjectParams& params, SharedMemory& shared, int first, int tiles,
                                        int pairs) {
  Ring<kStages> ring;
  for (int n = first; n < tiles; n += pairs) {
    const ProjectTile tile = tile_at(params, n);
    for (int k = 0; k < params.rank; k += kDepth) {
      Stage& stage = shared.stages[ring.stage];
      TransactionBarrier& full = shared.full[ring.stage];
      shared.empty[ring.stage].wait(ring.phase ^ 1);
      full.arrive_expecting(sizeof(Stage));
      load_box(stage.latents, params.latents, full, k, tile.row);
      load_weights(params, shared, ring.stage, k, tile.head);
      ring.advance();
    }
  }
}

// A warpgroup, row by row: 8 lanes copy 128 bytes of a row. Where each of a warp's 32 rows lies is known a tile ahead,
// a lane for a row. Rotary keys are copied while the consumers still have full stages.
__device__ __forceinline__ void gather(const MlaProjectParams& params, SharedMemory& shared, int first, int tiles,
                                       int pairs, int rows) {
  constexpr int kChunks = kDepth / 8;        // of 16 bytes
  constexpr int kAtOnce = 32 / kChunks;      // rows
  constexpr int kCopies = 32 / kAtOnce;      // of a lane
  const int lane = threadIdx.x % 32;
  const int first_row = threadIdx.x % kWarpgroupThreads / 32 * 32;  // of the warp's
  const int chunk = lane % kChunks;
  const auto offset_in = [&](int n) {
    const int row = tile_at(params, n).row + first_row + lane;
    return n < tiles && row < rows ? params.offsets[row] : int64_t{-1};
  };
  Ring<kStages> ring;
  int64_t offset = offset_in(first);
  for (int n = first; n < tiles; n += pairs) {
    const char* from[kCopies];
    unsigned live = 0;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int64_t at = __shfl_sync(~0u, offset, i * kAtOnce + lane / kChunks);
      live |= at >= 0 ? 1u << i : 0;
      from[i] = static_cast<const char*>(params.cache) + 2 * (max(at, int64_t{0}) + chunk * 8);
    }
    offset = offset_in(n + pairs);
    const int head = tile_at(params, n).head;
    for (int k = 0; k < params.rank; k += kDepth) {
      Stage& stage = shared.stages[ring.stage];
      TransactionBarrier& full = shared.full[ring.stage];
      shared.empty[ring.stage].wait(ring.phase ^ 1);
      if (threadIdx.x % kWarpgroupThreads == 0) {
        full.arrive_expecting(sizeof(stage.weights));
        load_weights(params, shared, ring.stage, k, head);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int row = first_row + i * kAtOnce + lane / kChunks;
        copy_line_or_zero_async(&stage.latents[row][(chunk ^ row % 8) * 8], from[i] + 2 * k, live >> i & 1);
      }
      full.arrive_after_copies();
      ring.advance();
    }
    if (!params.rotary || !brings_rotary(params, n)) continue;
    const int row_chunks = params.rope_dim / 8;
    const int64_t first_of_tile = tile_at(params, n).row;
    uint4* const rotary = static_cast<uint4*>(params.rotary) + first_of_tile * row_chunks;
    for (int c = chunk; c < row_chunks; c += kChunks) {
      uint4 keys[kCopies];
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        keys[i] = *reinterpret_cast<const uint4*>(from[i] + 2 * (params.rank + (c - chunk) * 8));
      }
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int row = first_row + i * kAtOnce + lane / kChunks;
        if (live >> i & 1) rotary[row * row_chunks + c] = keys[i];
      }
    }
  }
}

}  // namespace fovea::kernels::cuda
