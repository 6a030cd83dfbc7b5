// SPDX-License-Identifier: Apache-2.0
// The producer warps that transpose V for fp8 products, from rows of keys to rows of dims, between
// the copy of a key tile and its products (as in FlashAttention-3, arXiv:2407.08608, section 3.3).
#pragma once

#include "kernels/cuda/sm90/common/copy_tiles.cuh"

namespace fovea::kernels::cuda {

// Transposes a key tile, 32 keys x 16 dims at a time. Transposed 16-bit loads bring a lane two dims
// of keys 2t and 2t + 1 of every eight, where t is its place among four. Bytes of one dim of 2t, 2t
// + 1, 2t + 8 and 2t + 9 become a word of that dim's row: the order of weights. Keys outside
// [live_begin, live_end) become zeros.
template <class Config>
__device__ __forceinline__ void transpose_tile(
    const uint16_t (&from)[Config::kDimVBlocks][Config::kKeys][kSwizzledColumns],
    uint16_t (&to)[Config::kKeyBlocks][Config::kHeadDimV][kSwizzledColumns], int warp,
    int live_begin, int live_end) {
  const int lane = threadIdx.x % 32;
  const bool all_live = live_begin <= 0 && live_end >= Config::kKeys;
  // Even dims of a matrix's first four rows and odd dims of the others never share a bank.
  const bool upper = lane / 4 >= 4;
  const uint32_t bytes0 = upper ? 0x7531 : 0x6420;
  const uint32_t bytes1 = upper ? 0x6420 : 0x7531;
  // Matrices 0 and 1 have both words of keys 0 to 15, matrices 2 and 3 those of keys 16 to 31.
  const int dim = lane % 8 * 2 + ((lane / 8 % 2 == 1) != (lane % 8 >= 4));
  constexpr int kBatch = 4;  // groups of 16 dims, loaded before the first is stored
  static_assert(Config::kHeadDimV % (16 * kBatch * Config::kTransposers) == 0);
#pragma unroll 1
  for (int key = 0; key < Config::kKeys; key += 32) {
    const int key_row = key + lane;
    const int chunk = key / 16 + lane / 16;
#pragma unroll
    for (int part = 0; part < Config::kHeadDimV / 16; part += kBatch * Config::kTransposers) {
      uint32_t r[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int dims = part + warp * kBatch + i;
        load_matrices_transposed(r[i], &from[dims / 8][key_row][(dims % 8 ^ key_row % 8) * 8]);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (!all_live) {
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const int first = key + 8 * m + lane % 4 * 2;
            if (first < live_begin || first >= live_end) r[i][m] &= 0xffff0000;
            if (first + 1 < live_begin || first + 1 >= live_end) r[i][m] &= 0x0000ffff;
          }
        }
        const uint32_t words[4] = {
            __byte_perm(r[i][0], r[i][1], bytes0), __byte_perm(r[i][0], r[i][1], bytes1),
            __byte_perm(r[i][2], r[i][3], bytes0), __byte_perm(r[i][2], r[i][3], bytes1)};
        const int out_dim = (part + warp * kBatch + i) * 16 + dim;
        store_matrices(&to[chunk / 8][out_dim][(chunk % 8 ^ dim % 8) * 8], words);
      }
    }
  }
}

template <class Config>
__device__ void transpose_values(const PrefillParams& params,
                                 typename Config::SharedMemory& shared) {
  const int warp = threadIdx.x / 32 - 2;
  Ring<kTileSlots> slots;
  Ring<Config::kStages> stages;
  while (true) {
    shared.tile_full[slots.stage].wait(slots.phase);
    const WorkTile& tile = shared.tiles[slots.stage].work;
    if (tile.request < 0) return;
    const int first = tile.block_begin;
    const int kv_len = tile.kv_len, key_begin = tile.key_begin;
    for (int block = tile.block_end - 1; block >= first; --block) {
      shared.raw_full[stages.stage].wait(stages.phase);
      shared.v_empty[stages.stage].wait(stages.phase ^ 1);
      const int start = block * Config::kKeys;
      transpose_tile<Config>(shared.raw_v[stages.stage], shared.v[stages.stage], warp,
                             key_begin - start, kv_len - start);
      fence_async_proxy();
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        shared.v_full[stages.stage].arrive();
        shared.raw_empty[stages.stage].arrive();
      }
      stages.advance();
    }
    slots.advance();
  }
}

}  // namespace fovea::kernels::cuda
