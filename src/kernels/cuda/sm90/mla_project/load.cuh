// SPDX-License-Identifier: Apache-2.0
// The producer: loads stages of weights through the copy engine, and latents through it or row by
// row. The first block of a pair loads the weights of keys for both, the second those of values; a
// single block loads those of its side.
#pragma once

#include "kernels/cuda/sm90/mla_project/config.cuh"

namespace fovea::kernels::cuda {

// Loads this block's share of the weights of a step, to all blocks that need them. One thread.
template <class Config>
__device__ __forceinline__ void load_weights(const MlaProjectParams& params,
                                             typename Config::SharedMemory& shared, int stage,
                                             int k, const ProjectTile& tile) {
  auto& to = shared.stages[stage].weights;
  if constexpr (Config::kSides == 2) {
    const int side = cluster_rank();
    load_box_to_pair(to[side], side == 0 ? params.w_uk : params.w_uv, shared.full[stage], k, 0,
                     tile.head, 0);
  } else {
    load_box(to[0], tile.side == 0 ? params.w_uk : params.w_uv, shared.full[stage], kEvictNormal, k,
             0, tile.head, 0);
  }
}

// Loads rows in boxes. One thread.
template <class Config>
__device__ __forceinline__ void produce(const MlaProjectParams& params,
                                        typename Config::SharedMemory& shared, int first,
                                        int clusters) {
  Ring<Config::kStages> ring;
  const int tiles = live_tiles<Config>(params).tiles;
  for (int n = first; n < tiles; n += clusters) {
    const ProjectTile tile = tile_at<Config>(params, n);
    for (int k = 0; k < params.rank; k += kDepth) {
      auto& stage = shared.stages[ring.stage];
      TransactionBarrier& full = shared.full[ring.stage];
      shared.empty[ring.stage].wait(ring.phase ^ 1);
      full.arrive_expecting(sizeof(stage));
      load_box(stage.latents, params.latents, full, k, tile.row);
      load_weights<Config>(params, shared, ring.stage, k, tile);
      ring.advance();
    }
  }
}

// Copies rows one by one: 8 lanes copy 128 bytes of a row. Offsets of a warp's 32 rows are loaded
// one tile early, one a lane. Rotary keys are copied while the consumers still have full stages.
// One warpgroup.
template <class Config>
__device__ __forceinline__ void gather(const MlaProjectParams& params,
                                       typename Config::SharedMemory& shared, int first,
                                       int clusters) {
  constexpr int kChunks = kDepth / 8;    // chunks of 16 bytes in a row
  constexpr int kAtOnce = 32 / kChunks;  // rows of a warp
  constexpr int kCopies = 32 / kAtOnce;  // rows of a lane
  const int lane = threadIdx.x % 32;
  const int first_row = threadIdx.x % kWarpgroupThreads / 32 * 32;  // first row of the warp
  const int chunk = lane % kChunks;
  const auto row_in = [&](int n) { return tile_at<Config>(params, n).row + first_row + lane; };
  // Loaded concurrently with the number of live rows.
  int64_t offset = row_in(first) < params.rows ? params.offsets[row_in(first)] : -1;
  const auto [rows, tiles] = live_tiles<Config>(params);
  if (row_in(first) >= rows) offset = -1;
  Ring<Config::kStages> ring;
  for (int n = first; n < tiles; n += clusters) {
    const char* from[kCopies];
    unsigned live = 0;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int64_t at = __shfl_sync(~0u, offset, i * kAtOnce + lane / kChunks);
      live |= at >= 0 ? 1u << i : 0;
      from[i] = static_cast<const char*>(params.cache) + 2 * (max(at, int64_t{0}) + chunk * 8);
    }
    const int next = n + clusters;
    offset = next < tiles && row_in(next) < rows ? params.offsets[row_in(next)] : -1;
    const ProjectTile tile = tile_at<Config>(params, n);
    for (int k = 0; k < params.rank; k += kDepth) {
      auto& stage = shared.stages[ring.stage];
      TransactionBarrier& full = shared.full[ring.stage];
      shared.empty[ring.stage].wait(ring.phase ^ 1);
      if (threadIdx.x % kWarpgroupThreads == 0) {
        full.arrive_expecting(sizeof(stage.weights));
        load_weights<Config>(params, shared, ring.stage, k, tile);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int row = first_row + i * kAtOnce + lane / kChunks;
        copy_line_or_zero_async(&stage.latents[row][(chunk ^ row % 8) * 8], from[i] + 2 * k,
                                live >> i & 1);
      }
      full.arrive_after_copies();
      ring.advance();
    }
    if (!params.rotary || !brings_rotary<Config>(params, n)) continue;
    const int row_chunks = params.rope_dim / 8;
    const int64_t first_of_tile = tile.row;
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
