// SPDX-License-Identifier: Apache-2.0
// Loads keys through the copy engine, in boxes of pages that hold at least eight keys.
#pragma once

#include "kernels/cuda/sm90/mla_common/work.cuh"

namespace fovea::kernels::cuda {

// log2 of the keys of a box, which are 8, 16, 32 or 64: the first box must not wait for a division.
__device__ __forceinline__ int log_box_keys(const MlaDecodeParams& params) {
  return 31 - __clz(params.box_keys);
}
// The group of 8 keys, within its page, that a box starts with.
__device__ __forceinline__ int first_group(const MlaDecodeParams& params, int key) {
  return params.page_size == params.box_keys ? 0 : key % params.page_size / kGroupKeys;
}

// Pages of an item's boxes. Each lane looks up one page of the next 32, one batch before its use.
struct PageWindow {
  int page, next_page;

  // Reads through the L2, for the reason given at read_item.
  __device__ __forceinline__ static int find(const MlaDecodeParams& params, const MlaItem& item,
                                             int key) {
    const int log = log_box_keys(params);
    const int at =
        max((key >> 5 + log << 5 | static_cast<int>(threadIdx.x % 32)) << log, item.key_begin);
    if (at >= item.key_end) return 0;
    const int number = params.page_size == params.box_keys ? at >> log : at / params.page_size;
    const int32_t* page =
        params.page_table.pages + item.request * params.page_table.stride + number;
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

// The warp that loads keys.
template <class C>
struct BoxProducer {
  const MlaDecodeParams& params;
  typename C::SharedMemory& shared;
  const FirstWork& first_work;

  // The time between a free stage and the copy into it limits the kernel, so divisions and page
  // lookups come before the wait for the stage.
  __device__ __forceinline__ void run() const {
    Ring<C::kStages> ring;
    Ring<C::kRopeSlots> rope;
    TileReader<C> reader;
    PageWindow window;
    bool first = true;
    if (first_work.exists()) window.start(params, first_work.item);
    const int log = log_box_keys(params);
    const int window_keys = 32 << log;
    bool prefetches =
        C::kPrefetchesFirstKeys && params.list_complete && params.box_keys == kTileKeys;
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
      ring.advance(C::kQueries.stages);
      // The first key tile that may hold keys of this pass. They are complete only after the wait
      // for the preceding kernel; unless the caller guarantees earlier keys, none is before.
      const int earlier = params.keys_complete ? item.kv_len - item.q_len : 0;
      const int late_key = max(item.key_begin, earlier / kTileKeys * kTileKeys);
      if (prefetches && late_key == item.key_begin) prefetch_first_keys(item, window);
      prefetches = false;
      for (int key = item.key_begin; key < item.key_end; key += kTileKeys) {
        if (key > item.key_begin && (key & window_keys - 1) == 0) window.step(params, item, key);
        const int group = first_group(params, key);
        const int boxes = (min(item.key_end - key, kTileKeys) + params.box_keys - 1) >> log;
        const int page =
            __shfl_sync(~0u, window.page, (key >> log) + static_cast<int>(threadIdx.x % 32));
        // Waits only now, with everything at hand that the copy needs.
        if (key == late_key) wait_for_previous_kernel();
#pragma unroll
        for (int part = 0; part < C::kTileStages; ++part) {
          shared.empty[ring.stage].wait(ring.phase ^ 1);
          load(params.cache_map, shared.kv[ring.stage], shared.full[ring.stage],
               {page, group, boxes, part * C::kStageTiles});
          ring.advance();
        }
        if constexpr (C::kRopeTiles > 0) {
          shared.rope_empty[rope.stage].wait(rope.phase ^ 1);
          load(params.cache_rope_map, shared.rope[rope.stage], shared.rope_full[rope.stage],
               {page, group, boxes, C::kLatentTiles});
          rope.advance();
        }
      }
    }
  }

 private:
  // The boxes of a key tile: lane i has the page of box i, which starts at group `group` of it.
  struct Boxes {
    int page, group, count;
    int first_tile;  // first column tile
  };

  // Loads the column tiles of one key tile that `map` has in a box. One warp.
  template <int kTiles>
  __device__ __forceinline__ void load(const TensorMap& map, KeyTiles<kTiles>& to,
                                       TransactionBarrier& full, const Boxes& boxes) const {
    const int lane = threadIdx.x % 32;
    if (lane == 0) full.arrive_expecting(boxes.count * params.box_keys * 128 * kTiles);
    if (lane < boxes.count) {
      // Each key is read once, or twice at the same time, so its lines leave the L2 first.
      load_box(to.groups[lane * params.box_keys / kGroupKeys], map, full, kEvictFirst, 0, 0,
               boxes.first_tile, boxes.group, boxes.page);
    }
  }

  // Prefetches an item's first key tile into the L2 while the preceding kernel still runs. That
  // kernel may write some of these keys; the L2 receives its writes. Only for keys that are one
  // box, since several prefetches take as long as they save, and only for the request's first
  // rows, as blocks of the other rows load the same keys. One warp.
  __device__ __forceinline__ void prefetch_first_keys(const MlaItem& item,
                                                      const PageWindow& window) const {
    const int key = item.key_begin;
    const int lane = threadIdx.x % 32;
    const int page = __shfl_sync(~0u, window.page, key / kTileKeys % 32);
    if (lane > 0 || item.first_row > 0) return;
    const int group = first_group(params, key);
#pragma unroll
    for (int part = 0; part < C::kTileStages; ++part) {
      prefetch_box(params.cache_map, 0, 0, part * C::kStageTiles, group, page);
    }
    if constexpr (C::kRopeTiles > 0) {
      prefetch_box(params.cache_rope_map, 0, 0, C::kLatentTiles, group, page);
    }
  }
};

}  // namespace fovea::kernels::cuda
