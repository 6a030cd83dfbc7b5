// SPDX-License-Identifier: Apache-2.0
// Finds the row tiles that have a live row, where rows are skipped.
#pragma once

#include "kernels/cuda/common/hopper_head_gemm_params.h"

namespace fovea::kernels::cuda {

template <int kRows>
struct LiveTiles {
  static constexpr int kFlags = sizeof(uint4);  // rows whose flags one load brings
  static constexpr int kTilesOfWarp = 32 * kFlags / kRows;

  int count;
  uint16_t numbers[kMaxSkippingTiles];  // the live row tiles, ascending
  uint8_t alive[kMaxSkippingTiles];

  // Fills the list. All threads; synchronises the block.
  __device__ __forceinline__ void find(const uint8_t* skip, int live) {
    const int tiles = (live + kRows - 1) / kRows;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int warps = static_cast<int>(blockDim.x / 32);
    for (int base = warp * kTilesOfWarp; base < tiles; base += warps * kTilesOfWarp) {
      const int row = base * kRows + lane * kFlags;
      const unsigned any = __ballot_sync(~0u, any_row(skip + row, live - row));
      const int tile = base + lane;
      if (lane < kTilesOfWarp && tile < tiles) {
        constexpr int kLoads = kRows / kFlags;  // for a tile
        alive[tile] = (any >> lane * kLoads & ((1u << kLoads) - 1)) != 0;
      }
    }
    __syncthreads();
    if (warp == 0) list(tiles);
    __syncthreads();
  }

  // Returns the first row of the n-th live row tile; without skipped rows of the n-th row tile.
  __device__ __forceinline__ int row(const HopperHeadGemmParams& params, int n) const {
    return (params.skip ? numbers[n] : n) * kRows;
  }

 private:
  __device__ __forceinline__ void list(int tiles) {
    const int lane = threadIdx.x % 32;
    int found = 0;
    for (int base = 0; base < tiles; base += 32) {
      const int tile = base + lane;
      const bool lives = tile < tiles && alive[tile];
      const unsigned all = __ballot_sync(~0u, lives);
      if (lives) numbers[found + __popc(all & ((1u << lane) - 1))] = static_cast<uint16_t>(tile);
      found += __popc(all);
    }
    if (lane == 0) count = found;
  }

  // Returns whether one of kFlags rows, of which `rows` exist, is not skipped.
  __device__ __forceinline__ static bool any_row(const uint8_t* skip, int rows) {
    constexpr uint32_t kSkipped = 0x01010101;
    if (rows >= kFlags) {
      const uint4 flags = *reinterpret_cast<const uint4*>(skip);
      return (flags.x & flags.y & flags.z & flags.w) != kSkipped;
    }
    for (int i = 0; i < rows; ++i) {
      if (!skip[i]) return true;
    }
    return false;
  }
};

}  // namespace fovea::kernels::cuda
