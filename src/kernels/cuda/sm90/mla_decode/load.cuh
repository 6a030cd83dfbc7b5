// SPDX-License-Identifier: Apache-2.0
// The producer warpgroup: work items and query rows.
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

__device__ __forceinline__ int key_tiles(const MlaItem& item) {
  return (max(item.key_end - item.key_begin, 0) + kTileKeys - 1) / kTileKeys;
}

// Tells all roles what to do next; without an item, that there is nothing more. One thread.
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
    tile.masked = tile.tiles - max(min(open_end, item->key_end) - item->key_begin, 0) / kTileKeys;
  }
  shared.tile_empty[at.stage].wait(at.phase ^ 1);
  shared.tiles[at.stage] = tile;
  shared.tile_full[at.stage].arrive();
}

// A stage as it holds queries: column tiles of 64 rows.
template <class C>
__device__ __forceinline__ uint16_t (*query_stage(typename C::SharedMemory& shared,
                                                  int stage))[kTileRows][kTileColumns] {
  return reinterpret_cast<uint16_t(*)[kTileRows][kTileColumns]>(&shared.kv[stage]);
}

// Of a row of q; its division is worth doing before the wait for the kernel ahead.
struct QueryPlace {
  int token, head;

  template <class C>
  __device__ __forceinline__ static QueryPlace of(const MlaDecodeParams& params,
                                                  const MlaItem& item, int rank, int row) {
    const int packed = item.first_row + rank * C::kRows + row;
    return {item.q_begin + packed / params.q_heads, packed % params.q_heads};
  }
};

// Query rows of one work item: the tiles that live in registers through stages of the ring, from
// where the score warpgroup takes them, the rest to its place. Rows behind the last one are
// whatever stands there: rows do not mix. first: the place of the first one. One thread.
template <class C>
__device__ __forceinline__ void load_queries(const MlaDecodeParams& params,
                                             typename C::SharedMemory& shared, const MlaItem& item,
                                             int rank, const QueryPlace& first,
                                             Ring<C::kStages> ring) {
  const int warp = C::kQueryWarps > 1 ? threadIdx.x / 32 : 0;
  if (warp == 0) {
    shared.q_full.arrive_expecting(C::kRows * 128 * (C::kLatentTiles + C::kRopeTiles));
  }
  // A box of one column tile takes 86 cycles, one of all as long (2026-11-22).
  const int box_tiles = params.q_box_rows == C::kRows ? C::kQueryBoxTiles : 1;
#pragma unroll 1
  for (int row = 0; row < C::kRows; row += params.q_box_rows) {
    const auto [token, head] = row == 0 ? first : QueryPlace::of<C>(params, item, rank, row);
    Ring<C::kStages> at = ring;
#pragma unroll 1
    for (int t = warp; t < C::kLatentTiles; t += C::kQueryWarps * box_tiles) {
      void* to;
      if (t < C::kRegisterTiles) {
        to = query_stage<C>(shared, at.stage)[t % C::kStageTiles][row];
        if (C::kQueryWarps == 1 && (t + box_tiles) % C::kStageTiles == 0) at.advance();
      } else {
        to = shared.q[t - C::kRegisterTiles][row];
      }
      load_box(to, params.q_latent_map, shared.q_full, kEvictNormal, 0, head, t, token);
    }
    if (C::kRopeTiles > 0 && warp == C::kQueryWarps - 1) {
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

// A block's part of the list: asked for while its barriers are made.
struct FirstWork {
  int4 place;  // begin, end, step, rank
  MlaItem item;

  __device__ __forceinline__ void read(const MlaRange& range) {
    place = __ldcg(reinterpret_cast<const int4*>(&range));
    item = read_item(&range.first);
  }
  __device__ __forceinline__ bool exists() const { return place.x < place.y; }
  // Which of the blocks that have the items this one is.
  template <class C>
  __device__ __forceinline__ int rank() const {
    if constexpr (C::kPairs) {
      return place.w;
    } else {
      return block_rank<C>();
    }
  }
};

// One thread: work items and their queries. announced: the first item has been, by another thread.
template <class C>
__device__ __forceinline__ void produce_queries(const MlaDecodeParams& params,
                                                typename C::SharedMemory& shared,
                                                const FirstWork& first_work, bool announced) {
  const int4 place = first_work.place;
  const int rank = first_work.rank<C>();
  Ring<C::kStages> ring;
  Ring<kTileSlots> slot;
  uint32_t phase = 0;
  for (int i = place.x; i < place.y; i += place.z) {
    const bool is_first = i == place.x;
    const MlaItem item = is_first ? first_work.item : read_item(&params.work.items[i]);
    const int tiles = key_tiles(item);
    if (!is_first || !announced) announce_tile<C>(params, shared, &item, slot, rank);
    slot.advance();
    if (tiles == 0) continue;
    const auto query = QueryPlace::of<C>(params, item, rank, 0);
    const Ring<C::kStages> first = ring;
    // First, since by then the stages are a phase behind at most.
    shared.q_empty.wait(phase ^ 1);
#pragma unroll
    for (int t = 0; t < C::kQueryStages; ++t) {
      shared.empty[ring.stage].wait(ring.phase ^ 1);
      // Nobody waits for this, but phases stay in step. Behind the loads it could come late enough
      // to count among those of the keys that follow.
      shared.full[ring.stage].arrive();
      ring.advance();
    }
    wait_for_previous_kernel();
    load_queries<C>(params, shared, item, rank, query, first);
    phase ^= 1;
    ring.advance(2 * C::kHalfStages * tiles);
  }
  announce_tile<C>(params, shared, nullptr, slot, rank);
}

}  // namespace fovea::kernels::cuda
