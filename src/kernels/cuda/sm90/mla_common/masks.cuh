// SPDX-License-Identifier: Apache-2.0
// Which keys of a tile a row sees, and constants of the online softmax.
#pragma once

#include "kernels/cuda/common/log2.cuh"
#include "kernels/cuda/sm90/mla_common/work.cuh"

namespace fovea::kernels::cuda {

// The maximum that weights refer to lags behind the true one by up to this many powers of two, so
// that accumulated values are seldom rescaled. Weights then reach 256, and sums 256 times the keys.
constexpr float kMaximumLag = 8;
// Below any real score, yet finite, so that the difference of two is not NaN.
constexpr float kLowest = -1e30f;

// Row `half` (0 or 1) of the two accumulator rows that a thread of a warpgroup holds.
__device__ __forceinline__ int thread_row(int half) {
  return threadIdx.x % kWarpgroupThreads / 32 * 16 + threadIdx.x % 32 / 4 + half * 8;
}

// The lowest n bits set; n may be below 0 or above 64.
__device__ __forceinline__ uint64_t low_bits(int n) {
  return n >= 64 ? ~0ull : (1ull << max(n, 0)) - 1;
}

// Bit i is set if row `row` of the block sees key i of the key tile that `left` tiles follow.
__device__ __forceinline__ uint64_t seen_keys(const MlaDecodeParams& params, const RowTile& tile,
                                              int left, int row) {
  const int key = tile.item.key_begin + (tile.tiles - 1 - left) * kTileKeys;
  const MaskParams& mask = params.batch.mask;
  const int packed = tile.first_row + min(row, max(tile.rows - 1, 0));
  const int token = packed / params.q_heads;
  const int end = min(tile.item.key_end, visible_keys(mask, tile.view, token, token).end);
  uint64_t seen = low_bits(end - key);
  if (mask.tree && token < tile.view.q_len) {
    const uint64_t tree = mask.tree[tile.view.q_begin + token];
    const int first = tile.view.prefix() - key;  // position of the first draft in the tile
    if (first > -64 && first < 64) {
      seen &= first < 0 ? tree >> -first : tree << first | low_bits(first);
    } else if (first < 0) {
      seen = 0;
    }
  }
  return seen;
}

// Keys of the item's last tile.
__device__ __forceinline__ int keys_of_last_tile(const RowTile& tile) {
  return (tile.item.key_end - tile.item.key_begin - 1) % kTileKeys + 1;
}

}  // namespace fovea::kernels::cuda
