// SPDX-License-Identifier: Apache-2.0
// Copies of key tiles by the copy engine, in boxes of box_keys keys.
#pragma once

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/sm90/common/work_tile.cuh"

namespace fovea::kernels::cuda {

// The page of a box and its first key's place there. For coordinates outside of the tensor the copy
// engine writes zeros.
struct BoxPlace {
  int page = -1;
  int place = 0;
};

template <class Config>
__device__ __forceinline__ BoxPlace box_place(const PrefillParams& params, const WorkTile& tile,
                                              int block, int box) {
  const KeyParams& keys = params.attention.keys;
  const int key = block * Config::kKeys + box * params.box_keys;
  if (block < tile.block_begin || box * params.box_keys >= Config::kKeys || key >= tile.kv_len) {
    return {};
  }
  if (!keys.page_table) return {0, tile.first_key + key};
  return {keys.page_table[tile.request * keys.page_table_stride + key / keys.page_size],
          key % keys.page_size};
}

// Starts the boxes of a key tile, each lane some of them; `place` is that of the lane's first box.
// A whole warp calls it.
template <class Config, int kColumnBlocks>
__device__ __forceinline__ void load_key_tile(
    const PrefillParams& params, const TensorMap& map, const WorkTile& tile, int block,
    BoxPlace place, int lane, uint64_t policy,
    uint16_t (&to)[kColumnBlocks][Config::kKeys][kSwizzledColumns], TransactionBarrier& full) {
  if (lane == 0) full.arrive_expecting(sizeof(to));
  __syncwarp();
  const auto own_blocks = [&] {
    constexpr bool kMayShare = kLatentHeads<Config::kHeadDim, Config::kHeadDimV> &&
                               kColumnBlocks == Config::kHeadDim / kSwizzledColumns;
    return kMayShare ? kColumnBlocks - params.shared_blocks : kColumnBlocks;
  };
#pragma unroll 1
  for (int box = lane; box * params.box_keys < Config::kKeys; box += 32) {
    if (box >= 32) place = box_place<Config>(params, tile, block, box);
    const int row = box * params.box_keys;
    if constexpr (Config::kPairs) {
#pragma unroll
      for (int i = 0; i < kColumnBlocks; i += 2) {
        const int c = i + cluster_rank();
        if (c >= kColumnBlocks) break;
        const bool own = c < own_blocks();
        load_box_to_pair(&to[c][row], own ? map : params.shared_k, full,
                         (own ? c : c - own_blocks()) * kSwizzledColumns, own ? tile.kv_head : 0,
                         place.place, place.page);
      }
    } else {
#pragma unroll
      for (int c = 0; c < kColumnBlocks; ++c) {
        const bool own = c < own_blocks();
        load_box(&to[c][row], own ? map : params.shared_k, full, policy,
                 (own ? c : c - own_blocks()) * kSwizzledColumns, own ? tile.kv_head : 0,
                 place.place, place.page);
      }
    }
  }
}

}  // namespace fovea::kernels::cuda
