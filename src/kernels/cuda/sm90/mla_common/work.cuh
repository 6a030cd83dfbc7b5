// SPDX-License-Identifier: Apache-2.0
// Work items: a producer thread reads them from the planned list and hands them to all roles
// through a ring of row tiles in shared memory.
#pragma once

#include "kernels/cuda/common/visibility.cuh"
#include "kernels/cuda/sm90/mla_common/tiles.cuh"

namespace fovea::kernels::cuda {

constexpr int kTileSlots = 4;  // work items that the slowest role may lag behind the fastest

// A work item as a block computes it.
struct RowTile {
  MlaItem item;
  RequestView view;
  int first_row;     // first of the block's rows among the request's packed (token, head) rows
  int rows;          // valid rows of the block
  int tiles;         // key tiles of the item; -1: there is no more work
  int masked_tiles;  // key tiles at the end that hold keys which some row may not see
  bool paired;       // the row tile has two parts, which this kernel joins
};

// State of a producer that loads rows, for which it has no registers: the next item of the list,
// and the phase of q_empty by warp.
struct ProducerState {
  int index, end, step, rank;
  uint32_t q_phase[4];
};

// The request and keys of an item, which is all that loading keys needs.
struct KeySpan {
  int request, key_begin, key_end;
};

__device__ __forceinline__ int key_tiles(const MlaItem& item) {
  return (max(item.key_end - item.key_begin, 0) + kTileKeys - 1) / kTileKeys;
}

template <class C>
__device__ __forceinline__ int block_worker() {
  return blockIdx.x / C::kBlocks;
}
// Number of the block among those that have the same items. For pairs the plan gives it.
template <class C>
__device__ __forceinline__ int block_rank() {
  static_assert(!C::kPairs);
  return blockIdx.x % C::kBlocks;
}
template <class C>
__device__ __forceinline__ const MlaRange& block_range(const MlaDecodeParams& params) {
  return params.ranges[C::kPairs ? static_cast<int>(blockIdx.x) : block_worker<C>()];
}

// Reads an item through the L2: before the wait for the preceding kernel only the L2 is sure to
// have the complete list.
__device__ __forceinline__ MlaItem read_item(const MlaItem* from) {
  MlaItem item;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(MlaItem) / sizeof(int4)); ++i) {
    reinterpret_cast<int4*>(&item)[i] = __ldcg(reinterpret_cast<const int4*>(from) + i);
  }
  return item;
}

// The block's range of the list and its first item, read while barriers are initialised.
struct FirstWork {
  int4 place;  // begin, end, step, rank
  MlaItem item;

  __device__ __forceinline__ void read(const MlaRange& range) {
    place = __ldcg(reinterpret_cast<const int4*>(&range));
    item = read_item(&range.first);
  }
  __device__ __forceinline__ bool exists() const { return place.x < place.y; }
  // Number of the block among those that have the same items.
  template <class C>
  __device__ __forceinline__ int rank() const {
    if constexpr (C::kPairs) {
      return place.w;
    } else {
      return block_rank<C>();
    }
  }
};

// One role's position among the row tiles.
template <class C>
struct TileReader {
  Ring<kTileSlots> at;
  __device__ __forceinline__ const RowTile& take(typename C::SharedMemory& shared) {
    shared.tile_full[at.stage].wait(at.phase);
    return shared.tiles[at.stage];
  }
  // Arrives once a warp.
  __device__ __forceinline__ void give_back(typename C::SharedMemory& shared) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.tile_empty[at.stage].arrive();
    at.advance();
  }
};

// Hands an item to all roles; a null item says that there is no more work. One thread.
template <class C>
__device__ __forceinline__ void announce_tile(const MlaDecodeParams& params,
                                              typename C::SharedMemory& shared, const MlaItem* item,
                                              Ring<kTileSlots> at, int rank) {
  RowTile tile = {};
  tile.tiles = -1;
  if (item) {
    const MaskParams& mask = params.batch.mask;
    const int heads = params.q_heads;
    tile.item = *item;
    if constexpr (C::kPairs) {
      tile.paired = item->partial >= kPaired;
      if (tile.paired) tile.item.partial -= kPaired;
    }
    tile.view = {item->request, item->q_begin, item->q_len, item->kv_len};
    tile.first_row = item->first_row + rank * C::kRows;
    tile.rows = min(max(item->q_len * heads - tile.first_row, 0), C::kRows);
    tile.tiles = key_tiles(*item);
    const int token = tile.first_row / heads;
    const int open_end =
        mask.tree ? tile.view.prefix() : visible_keys(mask, tile.view, token, token).end;
    tile.masked_tiles =
        tile.tiles - max(min(open_end, item->key_end) - item->key_begin, 0) / kTileKeys;
  }
  shared.tile_empty[at.stage].wait(at.phase ^ 1);
  shared.tiles[at.stage] = tile;
  shared.tile_full[at.stage].arrive();
}

}  // namespace fovea::kernels::cuda
