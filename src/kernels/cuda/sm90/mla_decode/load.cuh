// SPDX-License-Identifier: Apache-2.0
// The producer warpgroup: work items, query rows, keys.
#pragma once

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/sm90/mla_decode/config.cuh"

namespace fovea::kernels::cuda {

// One warp has read a stage, or filled it.
__device__ __forceinline__ void release(TransactionBarrier& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier.arrive();
}

// One warp has read keys, or queries in their place: whoever fills the stage may do so again.
template <class C>
__device__ __forceinline__ void release_stage(TransactionBarrier& empty) {
  if constexpr (C::kShares) {
    __syncwarp();
    const uint32_t lane = threadIdx.x % 32;
    if (lane < C::kSharers) arrive_in_cluster(empty, lane);
  } else {
    release(empty);
  }
}

__device__ __forceinline__ void meet_cluster() {
  __syncwarp();
  cluster_arrive();
  cluster_wait();
}

// Tells all roles what to do next; without an item, that there is nothing more. One thread.
template <class C>
__device__ __forceinline__ int announce_tile(const MlaDecodeParams& params,
                                             typename C::SharedMemory& shared, const MlaItem* item,
                                             Ring<kTileSlots> at) {
  RowTile tile = {};
  tile.tiles = -1;
  if (item) {
    const MaskParams& mask = params.batch.mask;
    const int heads = params.batch.q_heads;
    tile.item = *item;
    if constexpr (C::kPairs) {
      tile.paired = item->partial >= kPaired;
      if (tile.paired) tile.item.partial -= kPaired;
    }
    tile.view = {item->request, item->q_begin, item->q_len, item->kv_len};
    tile.first_row = item->first_row + block_rank<C>() * C::kRows;
    tile.rows = min(max(item->q_len * heads - tile.first_row, 0), C::kRows);
    tile.tiles = (max(item->key_end - item->key_begin, 0) + kTileKeys - 1) / kTileKeys;
    const int token = tile.first_row / heads;
    const int open_end =
        mask.tree ? tile.view.prefix() : visible_keys(mask, tile.view, token, token).end;
    tile.masked = tile.tiles - max(min(open_end, item->key_end) - item->key_begin, 0) / kTileKeys;
  }
  shared.tile_empty[at.stage].wait(at.phase ^ 1);
  shared.tiles[at.stage] = tile;
  shared.tile_full[at.stage].arrive();
  return tile.tiles;
}

// A stage as it holds queries: column tiles of 64 rows.
template <class C>
__device__ __forceinline__ uint16_t (*query_stage(typename C::SharedMemory& shared,
                                                  int stage))[kTileRows][kTileColumns] {
  return reinterpret_cast<uint16_t(*)[kTileRows][kTileColumns]>(&shared.kv[stage]);
}

// Query rows of one work item: the tiles that live in registers through stages of the ring, from
// where the score warpgroup takes them, the rest to its place. Rows behind the last one are
// whatever stands there: rows do not mix. One thread.
template <class C>
__device__ __forceinline__ void load_queries(const MlaDecodeParams& params,
                                             typename C::SharedMemory& shared, const RowTile& tile,
                                             Ring<C::kStages> ring) {
  shared.q_full.arrive_expecting(C::kRows * 128 * (C::kLatentTiles + C::kRopeTiles));
#pragma unroll 1
  for (int row = 0; row < C::kRows; row += params.q_box_rows) {
    const int packed = tile.first_row + row;
    const int token = tile.view.q_begin + packed / params.batch.q_heads;
    const int head = packed % params.batch.q_heads;
    if constexpr (C::kSixteen) {
      // A box of each column tile takes 86 cycles, one of all as long (2026-11-22).
      const int box_tiles = params.q_box_rows == C::kRows ? C::kLatentTiles : 1;
#pragma unroll 1
      for (int t = 0; t < C::kLatentTiles; t += box_tiles) {
        load_box(shared.q[t][row], params.q_latent_map, shared.q_full, kEvictNormal, 0, head, t, token);
      }
      if constexpr (C::kRopeTiles > 0) {
        load_box(shared.q[C::kLatentTiles][row], params.q_rope_map, shared.q_full, 0, head, token);
      }
      continue;
    }
    Ring<C::kStages> at = ring;
// Addresses of all tiles do not fit beside what copies rows.
#pragma unroll(C::kLoader == pages ? C::kLatentTiles : 1)
    for (int t = 0; t < C::kLatentTiles; ++t) {
      void* to;
      if (t < C::kRegisterTiles) {
        to = query_stage<C>(shared, at.stage)[t % C::kStageTiles][row];
        if (t % C::kStageTiles == C::kStageTiles - 1) at.advance();
      } else {
        to = shared.q[t - C::kRegisterTiles][row];
      }
      load_box(to, params.q_latent_map, shared.q_full, t * kTileColumns, head, token);
    }
    if constexpr (C::kRopeTiles > 0) {
      load_box(shared.q[C::kQueryTiles - 1][row], params.q_rope_map, shared.q_full, 0, head, token);
    }
  }
}

// From the L2, which has a settled list before the wait.
__device__ __forceinline__ MlaItem read_item(const MlaItem* from) {
  MlaItem item;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(MlaItem) / sizeof(int4)); ++i) {
    reinterpret_cast<int4*>(&item)[i] = __ldcg(reinterpret_cast<const int4*>(from) + i);
  }
  return item;
}

// One thread: work items and their queries.
template <class C>
__device__ __forceinline__ void produce_queries(const MlaDecodeParams& params,
                                                typename C::SharedMemory& shared) {
  prefetch_tensor_map(params.q_latent_map);
  prefetch_tensor_map(params.q_rope_map);
  const MlaRange* range = &params.work.ranges[blockIdx.x / C::kBlocks];
  const int4 place = __ldcg(reinterpret_cast<const int4*>(range));  // begin, end, step
  Ring<C::kStages> ring;
  Ring<kTileSlots> slot;
  uint32_t phase = 0;
  for (int i = place.x; i < place.y; i += place.z) {
    const RowTile& tile = shared.tiles[slot.stage];
    const MlaItem item = read_item(i == place.x ? &range->first : &params.work.items[i]);
    const int tiles = announce_tile<C>(params, shared, &item, slot);
    if (i == place.x) wait_for_previous_kernel();
    slot.advance();
    if (tiles == 0) continue;
    const Ring<C::kStages> first = ring;
#pragma unroll
    for (int t = 0; t < C::kQueryStages; ++t) {
      shared.empty[ring.stage].wait(ring.phase ^ 1);
      ring.advance();
    }
    shared.q_empty.wait(phase ^ 1);
    load_queries<C>(params, shared, tile, first);
    phase ^= 1;
    ring = first;
#pragma unroll
    for (int t = 0; t < C::kQueryStages; ++t) {
      shared.full[ring.stage].arrive();  // nobody waits for these, but phases stay in step
      ring.advance();
    }
    ring.advance(2 * C::kHalfStages * tiles);
  }
  announce_tile<C>(params, shared, nullptr, slot);
}

// Pages of an item's boxes, looked up 32 at a time, one a lane, a group ahead of their use.
struct PageWindow {
  int page, next_page;

  // kEarly: from the L2, as read_item.
  template <bool kEarly = false>
  __device__ __forceinline__ static int find(const MlaDecodeParams& params, const MlaItem& item,
                                             int key) {
    const int group_keys = 32 * params.box_keys;
    const int at =
        max(key / group_keys * group_keys + static_cast<int>(threadIdx.x % 32) * params.box_keys,
            item.key_begin);
    if (at >= item.key_end) return 0;
    const int32_t* page =
        params.page_table + item.request * params.page_table_stride + at / params.page_size;
    return kEarly ? __ldcg(page) : *page;
  }
  __device__ __forceinline__ void start(const MlaDecodeParams& params, const MlaItem& item) {
    next_page = find<true>(params, item, item.key_begin);
    step<true>(params, item, item.key_begin);
  }
  template <bool kEarly = false>
  __device__ __forceinline__ void step(const MlaDecodeParams& params, const MlaItem& item,
                                       int key) {
    page = next_page;
    next_page = find<kEarly>(params, item, key + 32 * params.box_keys);
  }
};

// One box of the cache, which is read once (or twice at the same time): 5 % faster with this policy
// than without where memory is the limit (2026-11-21).
__device__ __forceinline__ void load_cache_box(void* shared, const TensorMap& map,
                                               TransactionBarrier& barrier, int column_tile,
                                               int group, int page) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, "
      "{%2, %2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(0), "r"(column_tile), "r"(group), "r"(page), "r"(shared_address(&barrier)),
      "l"(kEvictFirst)
      : "memory");
}

// Into the L2 alone.
__device__ __forceinline__ void prefetch_cache_box(const TensorMap& map, int column_tile, int group,
                                                   int page) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %1, %2, %3, %4}];" ::"l"(&map), "r"(0),
      "r"(column_tile), "r"(group), "r"(page)
      : "memory");
}

// The column tiles of one key tile that `map` has in a box. One warp; lane i < boxes has the page of
// box i, which begins at group `group` of it.
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

// Asks the L2 for an item's first key tile while the kernel ahead still runs, which may write some of it: the
// L2 has what it writes. The blocks of a request's other rows copy the same keys. One warp, for keys that
// are one box: asking for several takes as long as it saves (2026-11-22).
template <class C>
__device__ __forceinline__ void prefetch_first_keys(const MlaDecodeParams& params,
                                                    const MlaItem& item, int first_row,
                                                    const PageWindow& window) {
  const int key = item.key_begin;
  const int lane = threadIdx.x % 32;
  const int page = __shfl_sync(~0u, window.page, key / kTileKeys % 32);
  if (lane > 0 || first_row > 0) return;
  const int group = key % params.page_size / kGroupKeys;
#pragma unroll
  for (int part = 0; part < 2 * C::kHalfStages; ++part) {
    prefetch_cache_box(params.cache_map, part * C::kStageTiles, group, page);
  }
  if constexpr (C::kRopeTiles > 0) {
    prefetch_cache_box(params.cache_rope_map, C::kLatentTiles, group, page);
  }
}

// One warp. Every cycle between a free stage and the copy into it counts: with the divisions and
// the page behind the wait, the kernel took 1.35 times as long (2026-11-21).
template <class C>
__device__ __forceinline__ void produce_keys(const MlaDecodeParams& params,
                                             typename C::SharedMemory& shared) {
  Ring<C::kStages> ring;
  Ring<C::kRopeSlots> rope;
  TileReader<C> reader;
  PageWindow window;
  if (threadIdx.x % 32 == 0) {
    prefetch_tensor_map(params.cache_map);
    prefetch_tensor_map(params.cache_rope_map);
  }
  const int group_keys = 32 * params.box_keys;
  bool early = C::kSixteen && params.list_settled && params.box_keys == kTileKeys;
  while (true) {
    const RowTile& tile = reader.take(shared);
    const MlaItem item = tile.item;
    const int first_row = tile.first_row;
    const int tiles = tile.tiles;
    reader.give_back(shared);
    if (tiles < 0) return;
    if (tiles == 0) continue;
    ring.advance(C::kQueryStages);
    window.start(params, item);
    if (early) prefetch_first_keys<C>(params, item, first_row, window);
    early = false;
    // Narrow blocks have little else to do: 0.3 to 0.6 us less with all that the first copy needs at hand
    // (2026-11-22).
    if constexpr (!C::kNarrow) wait_for_previous_kernel();
    for (int key = item.key_begin; key < item.key_end; key += kTileKeys) {
      if (key > item.key_begin && key % group_keys == 0) window.step(params, item, key);
      const int page = __shfl_sync(
          ~0u, window.page, key % group_keys / params.box_keys + static_cast<int>(threadIdx.x % 32));
      const int group = key % params.page_size / kGroupKeys;
      const int boxes =
          (min(item.key_end - key, kTileKeys) + params.box_keys - 1) / params.box_keys;
      if (C::kNarrow && key == item.key_begin) wait_for_previous_kernel();
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

// Columns [first_tile * 64, + kTiles * 64) of 64 rows, 8 lanes a row, swizzled as the copy engine
// does. from[i]: this lane's chunk of its i-th row, null behind the last key: those rows become
// zero.
template <int kTiles>
__device__ __forceinline__ void copy_rows(const char* const (&from)[4], int first_tile,
                                          KeyTiles<kTiles>& to) {
  const int row = threadIdx.x / 8;
  char* first = reinterpret_cast<char*>(&to.row(0, row)[(threadIdx.x % 8 ^ row % 8) * 8]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const char* source = from[i] ? from[i] + first_tile * 128 : nullptr;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      copy_async(first + 16 * i / kGroupKeys * to.kGroupBytes + t * kGroupTileBytes,
                 source ? source + t * 128 : source, source ? 16 : 0);
    }
  }
}

// What a producer has to know of an item.
struct KeySpan {
  int request, key_begin, key_end;
};

// Page and place in it of keys a tile apart, without a division for each: two for every row and tile held
// back the copies.
struct KeyPlace {
  int number, place;  // page of the request; key of the page

  __device__ __forceinline__ KeyPlace(const MlaDecodeParams& params, int key)
      : number(key / params.page_size), place(key - number * params.page_size) {}
  __device__ __forceinline__ void next_tile(const MlaDecodeParams& params) {
    number += params.tile_pages;
    place += params.tile_page_keys;
    if (place >= params.page_size) {
      place -= params.page_size;
      ++number;
    }
  }
};

// Where an item's rows are. Lane i looks after one of the warp's 16 rows of a tile, i % 16, and finds
// its page before the wait for the tile before; from the L2, as read_item.
struct RowPlaces {
  int request;
  KeyPlace at;   // of the next tile
  int left;      // keys from there on, 0 or less behind the last one
  int page = 0;  // of the next tile

  __device__ __forceinline__ RowPlaces(const MlaDecodeParams& params, const KeySpan& item)
      : request(item.request),
        at(params, item.key_begin + row_of_lane()),
        left(item.key_end - item.key_begin - row_of_lane()) {
    find_page(params);
  }
  __device__ __forceinline__ static int row_of_lane() {
    const int lane = threadIdx.x % 32;
    return lane % 16 / 4 * 16 + static_cast<int>(threadIdx.x / 32) * 4 + lane % 4;
  }
  __device__ __forceinline__ void find_page(const MlaDecodeParams& params) {
    if (left <= 0) return;
    page = __ldcg(&params.page_table[request * params.page_table_stride + at.number]);
  }
  // Bytes from the cache's first row on, -1 behind the last key.
  __device__ __forceinline__ int64_t take(const MlaDecodeParams& params) {
    const int64_t row = left > 0 ? page * params.page_stride + at.place * params.token_stride : -1;
    at.next_tile(params);
    left -= kTileKeys;
    find_page(params);
    return row;
  }
};

// What the producer finds out of an item's keys before it waits for anything.
template <class C>
__device__ __forceinline__ auto find_keys(const MlaDecodeParams& params, const KeySpan& item) {
  if constexpr (C::kFp8) {
    return item;
  } else {
    return RowPlaces(params, item);
  }
}

// The keys of one work item row by row, for any page size. All warps of the producer.
template <class C>
__device__ __forceinline__ void copy_keys(const MlaDecodeParams& params,
                                          typename C::SharedMemory& shared, RowPlaces& places,
                                          int tiles, Ring<C::kStages>& ring,
                                          Ring<C::kRopeSlots>& rope) {
  const int lane = threadIdx.x % 32;
  for (int t = 0; t < tiles; ++t) {
    const int64_t row = places.take(params);
    const char* from[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int64_t offset = __shfl_sync(~0u, row, 4 * r + lane / 8);
      from[r] = offset < 0 ? nullptr : static_cast<const char*>(params.cache) + offset + lane % 8 * 16;
    }
#pragma unroll
    for (int part = 0; part < 2 * C::kHalfStages; ++part) {
      shared.empty[ring.stage].wait(ring.phase ^ 1);
      copy_rows(from, part * C::kStageTiles, shared.kv[ring.stage]);
      shared.full[ring.stage].arrive_after_copies();
      ring.advance();
    }
    if constexpr (C::kRopeTiles > 0) {
      shared.rope_empty[rope.stage].wait(rope.phase ^ 1);
      copy_rows(from, C::kLatentTiles, shared.rope[rope.stage]);
      shared.rope_full[rope.stage].arrive_after_copies();
      rope.advance();
    }
  }
}

}  // namespace fovea::kernels::cuda
