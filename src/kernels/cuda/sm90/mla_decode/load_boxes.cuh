// SPDX-License-Identifier: Apache-2.0
// Keys through the copy engine, in boxes: pages that hold eight keys side by side.
#pragma once

#include "kernels/cuda/sm90/mla_decode/load.cuh"

namespace fovea::kernels::cuda {

// Boxes hold 8, 16, 32 or 64 keys: a block that starts late has no time for divisions.
__device__ __forceinline__ int log_box_keys(const MlaDecodeParams& params) {
  return 31 - __clz(params.box_keys);
}
// Of its page, the group of keys that a box begins with.
__device__ __forceinline__ int first_group(const MlaDecodeParams& params, int key) {
  return params.page_size == params.box_keys ? 0 : key % params.page_size / kGroupKeys;
}

// Pages of an item's boxes, looked up 32 at a time, one a lane, a group ahead of their use.
struct PageWindow {
  int page, next_page;

  // From the L2, as read_item.
  __device__ __forceinline__ static int find(const MlaDecodeParams& params, const MlaItem& item,
                                             int key) {
    const int log = log_box_keys(params);
    const int at =
        max((key >> 5 + log << 5 | static_cast<int>(threadIdx.x % 32)) << log, item.key_begin);
    if (at >= item.key_end) return 0;
    const int number = params.page_size == params.box_keys ? at >> log : at / params.page_size;
    const int32_t* page = params.page_table + item.request * params.page_table_stride + number;
    return __ldcg(page);
  }
  __device__ __forceinline__ void start(const MlaDecodeParams& params, const MlaItem& item) {
    next_page = find(params, item, item.key_begin);
    step(params, item, item.key_begin);
  }
  __device__ __forceinline__ void step(const MlaDecodeParams& params, const MlaItem& item,
                                       int key) {
    page = next_page;
    next_page = find(params, item, key + 32 * params.box_keys);
  }
};

// One box of the cache, which is read once (or twice at the same time): 5 % faster with this policy
// than without where memory is the limit (2026-11-21).
__device__ __forceinline__ void load_cache_box(void* shared, const TensorMap& map,
                                               TransactionBarrier& barrier, int column_tile,
                                               int group, int page) {
  load_box(shared, map, barrier, kEvictFirst, 0, 0, column_tile, group, page);
}

// The column tiles of one key tile that `map` has in a box. One warp; lane i < boxes has the page
// of box i, which begins at group `group` of it.
template <int kTiles>
__device__ __forceinline__ void load_keys(const MlaDecodeParams& params, const TensorMap& map,
                                          KeyTiles<kTiles>& to, TransactionBarrier& full, int page,
                                          int group, int boxes, int first_tile) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) full.arrive_expecting(boxes * params.box_keys * 128 * kTiles);
  if (lane < boxes) {
    load_cache_box(to.groups[lane * params.box_keys / kGroupKeys], map, full, first_tile, group,
                   page);
  }
}

// Asks the L2 for an item's first key tile while the kernel ahead still runs, which may write some
// of it: the L2 has what it writes. The blocks of a request's other rows copy the same keys. One
// warp, for keys that are one box: asking for several takes as long as it saves (2026-11-22).
template <class C>
__device__ __forceinline__ void prefetch_first_keys(const MlaDecodeParams& params,
                                                    const MlaItem& item, const PageWindow& window) {
  const int key = item.key_begin;
  const int lane = threadIdx.x % 32;
  const int page = __shfl_sync(~0u, window.page, key / kTileKeys % 32);
  if (lane > 0 || item.first_row > 0) return;
  const int group = first_group(params, key);
#pragma unroll
  for (int part = 0; part < 2 * C::kHalfStages; ++part) {
    prefetch_box(params.cache_map, 0, 0, part * C::kStageTiles, group, page);
  }
  if constexpr (C::kRopeTiles > 0) {
    prefetch_box(params.cache_rope_map, 0, 0, C::kLatentTiles, group, page);
  }
}

// One warp. Every cycle between a free stage and the copy into it counts: with the divisions and
// the page behind the wait, the kernel took 1.35 times as long (2026-11-21).
template <class C>
__device__ __forceinline__ void produce_keys(const MlaDecodeParams& params,
                                             typename C::SharedMemory& shared,
                                             const FirstWork& first_work) {
  Ring<C::kStages> ring;
  Ring<C::kRopeSlots> rope;
  TileReader<C> reader;
  PageWindow window;
  bool first = true;
  if (first_work.exists()) window.start(params, first_work.item);
  const int log = log_box_keys(params);
  const int group_keys = 32 << log;
  bool early = C::kSixteen && params.list_settled && params.box_keys == kTileKeys;
  while (true) {
    MlaItem item = first_work.item;
    int tiles = key_tiles(item);
    if (!first || !first_work.exists()) {
      const RowTile& tile = reader.take(shared);
      item = tile.item;
      tiles = tile.tiles;
    }
    reader.give_back(shared);
    if (tiles < 0) return;
    if (!first && tiles > 0) window.start(params, item);
    first = false;
    if (tiles == 0) continue;
    ring.advance(C::kQueryStages);
    // The first key tile with keys that were not there before the pass, which are promised only
    // behind the wait: without a promise the first of all.
    const int earlier = params.keys_settled ? item.kv_len - item.q_len : 0;
    const int late_key = max(item.key_begin, earlier / kTileKeys * kTileKeys);
    if (early && late_key == item.key_begin) prefetch_first_keys<C>(params, item, window);
    early = false;
    for (int key = item.key_begin; key < item.key_end; key += kTileKeys) {
      if (key > item.key_begin && (key & group_keys - 1) == 0) window.step(params, item, key);
      const int group = first_group(params, key);
      const int boxes = (min(item.key_end - key, kTileKeys) + params.box_keys - 1) >> log;
      const int page =
          __shfl_sync(~0u, window.page, (key >> log) + static_cast<int>(threadIdx.x % 32));
      // With all that the copy needs at hand: 0.3 to 0.6 us less in narrow blocks (2026-11-22).
      if (key == late_key) wait_for_previous_kernel();
#pragma unroll
      for (int part = 0; part < 2 * C::kHalfStages; ++part) {
        shared.empty[ring.stage].wait(ring.phase ^ 1);
        load_keys(params, params.cache_map, shared.kv[ring.stage], shared.full[ring.stage], page,
                  group, boxes, part * C::kStageTiles);
        ring.advance();
      }
      if constexpr (C::kRopeTiles > 0) {
        shared.rope_empty[rope.stage].wait(rope.phase ^ 1);
        load_keys(params, params.cache_rope_map, shared.rope[rope.stage],
                  shared.rope_full[rope.stage], page, group, boxes, C::kLatentTiles);
        rope.advance();
      }
    }
  }
}

}  // namespace fovea::kernels::cuda
