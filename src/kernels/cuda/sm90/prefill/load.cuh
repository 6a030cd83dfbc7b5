// SPDX-License-Identifier: Apache-2.0
// The producer: one warp takes tiles from the list and starts the copies of q in boxes, one those of K and
// one those of V. What the copy engine cannot bring is in load_rows.cuh and transpose.cuh.
#pragma once

#include "kernels/cuda/sm90/prefill/find_masks.cuh"
#include "kernels/cuda/sm90/prefill/pair.cuh"
#include "kernels/cuda/sm90/prefill/parts.cuh"

namespace fovea::kernels::cuda {

// Leaves of a cut row tile's key tiles those of its segments.
template <class Config>
__device__ TileCut cut_work(const BatchParams& batch, const TileSegments& tile, WorkTile& work) {
  constexpr int kBlocks = Config::kSegmentBlocks;
  if (tile.partial < 0) return {};
  const int first = work.block_begin / kBlocks;
  const int count = (work.block_end - 1) / kBlocks + 1 - first;
  work.block_begin = max(work.block_begin, tile.begin * kBlocks);
  work.block_end = min(work.block_end, tile.end * kBlocks);
  return {first, count, tile.end - tile.begin, tile.partial * batch.q_heads + work.q_head * work.q_len};
}

// Work n of the launch: sections of head blocks, in a section every tile from the heaviest, and of a
// tile the section's heads side by side.
template <class Config>
__device__ WorkTile work_at(const PrefillParams& params, const PrefillOrder& order, int n, TileCut& cut) {
  const int tiles = order.tile_count;
  WorkTile work = {};
  const BatchParams& batch = params.attention.batch;
  const int head_blocks = batch.q_heads >> params.heads_shift;
  work.request = -1;
  if (n >= tiles * head_blocks) return work;
  const int section = n / (tiles * order.section_heads);
  const int first_head = section * order.section_heads;
  const int heads = min(order.section_heads, head_blocks - first_head);
  const int within = n - tiles * first_head;
  const PrefillTile tile = order.tiles[within / heads];
  TileSegments segments = {};
  if constexpr (Config::kSegments) segments = params.segments.tiles[within / heads];
  const RequestView view = Config::kSegments
                               ? RequestView{tile.request, segments.q_begin, segments.q_len, segments.kv_len}
                               : request_view(batch, tile.request);
  work.request = tile.request;
  work.q_begin = view.q_begin;
  work.q_len = view.q_len;
  work.kv_len = view.kv_len;
  work.first_token = tile.first_token;
  work.q_head = (first_head + within % heads) << params.heads_shift;
  work.kv_head = work.q_head / (batch.q_heads / batch.kv_heads);
  if (!params.attention.keys.page_table) {
    work.first_key = params.attention.keys.kv_indptr[tile.request];
  }
  const int tokens = (kGroupRows >> params.heads_shift) * Config::kConsumers;
  const int last = min(tile.first_token + Config::kBlocks * tokens, view.q_len) - 1;
  // Cuts of a row tile are those that prefill_order sees.
  const Interval keys = Config::kGeneral && !Config::kSegments
                            ? tile_keys(batch.mask, view, tile.first_token, last)
                            : visible_keys(batch.mask, view, tile.first_token, last);
  if constexpr (Config::kPairs) work.first_token += cluster_rank() * tokens;
  work.key_begin = keys.begin;
  work.block_begin = keys.begin / Config::kKeys;
  work.block_end = max((keys.end + Config::kKeys - 1) / Config::kKeys, work.block_begin + 1);
  if constexpr (Config::kSegments) cut = cut_work<Config>(batch, segments, work);
  return work;
}

// Leaves the block's rows and key tiles of a pair's; returns how many of the last pass it by. The blocks have the later
// rows in turn, so that both have as much to do.
template <class Config>
__device__ int leave_own_rows(const PrefillParams& params, int turn, WorkTile& work) {
  const int tokens = (kGroupRows >> params.heads_shift) * Config::kConsumers;
  if (turn % 2 == 1) work.first_token += cluster_rank() == 0 ? tokens : -tokens;
  const int last = min(work.first_token + tokens, work.q_len) - 1;
  const RequestView view = {work.request, work.q_begin, work.q_len, work.kv_len};
  const int keys_end = visible_keys(params.attention.batch.mask, view, last, last).end;
  const int block_end = max((keys_end + Config::kKeys - 1) / Config::kKeys, work.block_begin + 1);
  const int passed = min(work.block_end - block_end, 1);
  work.block_end -= passed;
  return passed;
}

template <class Config>
__device__ RowsView rows_view(const PrefillParams& params, const WorkTile& work, int consumer) {
  const MaskParams& mask = params.attention.batch.mask;
  const RequestView view = {work.request, work.q_begin, work.q_len, work.kv_len};
  const int tokens = kGroupRows >> params.heads_shift;
  const int first = min(work.first_token + consumer * tokens, work.q_len - 1);
  const int last = min(first + tokens, work.q_len) - 1;
  RowsView rows;
  int end;
  if constexpr (Config::kParts) {
    rows = {work.key_begin, work.kv_len, 0};
    end = work.kv_len;
  } else if constexpr (Config::kGeneral) {
    const Interval open = open_keys(mask, view, first, last);
    rows = {open.begin, open.end, 0};
    end = tile_keys(mask, view, first, last).end;
  } else {
    const Interval low = visible_keys(mask, view, first, first);
    const Interval high = visible_keys(mask, view, last, last);
    // Both ends grow with the token.
    rows = {high.begin, low.end, 0};
    end = high.end;
  }
  const int seen = end - (work.block_end - 1) * Config::kKeys;
  rows.columns = min((max(seen, 1) + Config::kGrain - 1) / Config::kGrain * Config::kGrain,
                     Config::kKeys);
  return rows;
}

// Takes tiles from the list into the ring of slots. A warp.
template <class Config>
struct TileTaker {
  const PrefillParams& params;
  typename Config::SharedMemory& shared;
  // The first tile of each block or pair is its own, unless some begin late. Of parts all are.
  int n = Config::kParts    ? params.attention.work.cta_begin[blockIdx.x]
          : params.beside ? next()
                          : blockIdx.x / Config::kBlocks;
  Ring<kTileSlots> slots = {};

  __device__ __forceinline__ int next() const {
    const int taken = threadIdx.x % 32 == 0 ? atomicAdd(&params.order->taken, 1) : 0;
    return __shfl_sync(~0u, taken, 0);
  }

  // The first block of a pair takes for both.
  __device__ __forceinline__ void share_taken() {
    int32_t& taken = shared.pair.taken[slots.stage];
    TransactionBarrier& full = shared.pair.taken_full[slots.stage];
    TransactionBarrier& empty = shared.pair.taken_empty[slots.stage];
    if (threadIdx.x % 32 == 0) {
      if (cluster_rank() == 0) {
        empty.wait(slots.phase ^ 1);
        store_in_cluster(&taken, 1, n, full);
      } else {
        full.arrive_expecting(sizeof(taken));
        full.wait(slots.phase);
        n = taken;
        arrive_in_cluster(empty, 0);
      }
    }
    n = __shfl_sync(~0u, n, 0);
  }

  // No request: that is the mark behind the last one. Lanes find what the consumers see.
  __device__ __forceinline__ const WorkTile& take() {
    const int lane = threadIdx.x % 32;
    shared.tile_empty[slots.stage].wait(slots.phase ^ 1);
    if constexpr (Config::kPairs) share_taken();
    typename Config::Slot& slot = shared.tiles[slots.stage];
    TileCut cut;
    int32_t partial = -1;
    WorkTile work;
    if constexpr (Config::kParts) {
      work = part_at<Config>(params, n, partial);
    } else {
      work = work_at<Config>(params, *params.order, n, cut);
    }
    if constexpr (Config::kPasses) {
      const int passed = leave_own_rows<Config>(params, slots.stage, work);
      if (lane == 0) slot.passed = passed;
    }
    if (lane == 0) {
      slot.work = work;
      if constexpr (Config::kParts) slot.partial = partial;
      if constexpr (Config::kSegments) slot.cut = cut;
    }
    __syncwarp();
    const bool more = work.request >= 0;
    if (lane < Config::kConsumers) {
      if (more) slot.rows[lane] = rows_view<Config>(params, slot.work, lane);
      shared.tile_full[slots.stage].arrive();
    }
    slots.advance();
    if constexpr (Config::kParts) {
      ++n;
    } else if (more && (!Config::kPairs || cluster_rank() == 0)) {
      n = next() + (params.beside ? 0 : gridDim.x / Config::kBlocks);
    }
    return slot.work;
  }

  __device__ __forceinline__ void finish() {
    if constexpr (Config::kParts) return;
    // The last block to run out of work leaves the counters as it found them.
    if (threadIdx.x % 32 == 0 &&
        atomicAdd(&params.order->finished, 1) == static_cast<int>(gridDim.x) - 1) {
      params.order->taken = 0;
      params.order->finished = 0;
    }
    // So the end of this launch is the end of both, to whatever follows in the stream.
    if (params.beside && blockIdx.x == 0) wait_for_previous_kernel();
  }
};

// Queries of a row tile, a lane for those of a consumer. A warp.
template <class Config>
__device__ __forceinline__ void load_queries_boxes(const PrefillParams& params,
                                                   typename Config::SharedMemory& shared,
                                                   const WorkTile& tile,
                                                   Ring<Config::kQueryStages>& q) {
  const int w = threadIdx.x % 32;
  if (w < Config::kConsumers) {
    TransactionBarrier& full = shared.q_full[q.stage][w];
    shared.q_empty[q.stage][w].wait(q.phase ^ 1);
    full.arrive_expecting(sizeof(shared.q[0][0]));
    const int token = tile.q_begin + tile.first_token + w * (kGroupRows >> params.heads_shift);
#pragma unroll
    for (int c = 0; c < Config::kDimBlocks; ++c) {
      load_box(shared.q[q.stage][w][c], params.q, full, kEvictFirst, c * kSwizzledColumns, tile.q_head, token);
    }
  }
  __syncwarp();
  q.advance();
}

// The same through a stage of keys. A warp.
template <class Config>
__device__ __forceinline__ void load_query_stage(const PrefillParams& params,
                                                 typename Config::SharedMemory& shared, const WorkTile& tile,
                                                 Ring<Config::kKeyStages>& at) {
  const int lane = threadIdx.x % 32;
  TransactionBarrier& full = shared.k_full[at.stage];
  shared.k_empty[at.stage].wait(at.phase ^ 1);
  if (lane == 0) full.arrive_expecting(sizeof(shared.k[0]));
  __syncwarp();
  if (lane < Config::kConsumers * Config::kDimBlocks) {
    const int consumer = lane / Config::kDimBlocks;
    const int c = lane % Config::kDimBlocks;
    const int token = tile.q_begin + tile.first_token + consumer * (kGroupRows >> params.heads_shift);
    load_box(Config::queries(shared, at.stage, consumer)[c], params.q, full, kEvictFirst, c * kSwizzledColumns,
             tile.q_head, token);
  }
  __syncwarp();
  at.advance();
}

// Runs ahead of the copies, so that the chain of loads behind a tile is hidden; and a tile ahead with the
// queries: 2 to 5 % (H200, 2026-11-22).
template <class Config>
__device__ void take_tiles(const PrefillParams& params, typename Config::SharedMemory& shared) {
  TileTaker<Config> taker{params, shared};
  Ring<Config::kQueryStages> q;
  while (true) {
    const WorkTile& tile = taker.take();
    if (tile.request < 0) break;
    if constexpr (!Config::kQueryRing) load_queries_boxes<Config>(params, shared, tile, q);
  }
  taker.finish();
}

// A key tile is copied in boxes of box_keys keys by the lanes of a warp. Where a box lies: its page and
// place; the copy engine writes zeros for coordinates outside of the tensor.
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

// `place` is that of the lane's first box.
template <class Config, int kColumnBlocks>
__device__ __forceinline__ void load_key_tile(
    const PrefillParams& params, const TensorMap& map, const WorkTile& tile, int block,
    BoxPlace place, int lane, uint64_t policy,
    uint16_t (&to)[kColumnBlocks][Config::kKeys][kSwizzledColumns], TransactionBarrier& full) {
  if (lane == 0) full.arrive_expecting(sizeof(to));
  __syncwarp();
#pragma unroll 1
  for (int box = lane; box * params.box_keys < Config::kKeys; box += 32) {
    if (box >= 32) place = box_place<Config>(params, tile, block, box);
    const int row = box * params.box_keys;
    if constexpr (Config::kPairs) {
#pragma unroll
      for (int i = 0; i < kColumnBlocks; i += 2) {
        const int c = i + cluster_rank();
        load_box_to_pair(&to[c][row], map, full, c * kSwizzledColumns, tile.kv_head, place.place, place.page);
      }
    } else {
#pragma unroll
      for (int c = 0; c < kColumnBlocks; ++c) {
        load_box(&to[c][row], map, full, policy, c * kSwizzledColumns, tile.kv_head, place.place, place.page);
      }
    }
  }
}

// Copies K, V or both, key tile by key tile; both only where V is transposed on its way. A warp. K and V have
// one each, as lanes start their boxes one after the other: 2 to 3 % faster than one warp for both over pages
// of 64, 26 % over pages of 16 (H200, 2026-11-22). Where no warp is idle that of V finds masks.
template <class Config, bool kOfKeys, bool kOfValues>
__device__ void copy_tiles(const PrefillParams& params, typename Config::SharedMemory& shared) {
  const int lane = threadIdx.x % 32;
  // Beside decode, which streams through the L2, keys would have to be fetched again for every row tile: 2
  // prompts of 4k beside 64 decodes at 8k took 750 to 1030 us, now 733 to 741 (H200, 2026-11-22).
  const uint64_t policy = params.beside ? kEvictLast : kEvictNormal;
  Ring<kTileSlots> slots;
  Ring<kOfKeys ? Config::kKeyStages : Config::kStages> at;
  [[maybe_unused]] uint32_t masks_phase = 0;
  while (true) {
    shared.tile_full[slots.stage].wait(slots.phase);
    const WorkTile& tile = shared.tiles[slots.stage].work;
    if (tile.request < 0) break;
    const auto end = [&] {
      if constexpr (Config::kPasses) return tile.block_end + shared.tiles[slots.stage].passed;
      return tile.block_end;
    };
    BoxPlace place = box_place<Config>(params, tile, end() - 1, lane);
    if constexpr (Config::kQueryRing && kOfKeys) load_query_stage<Config>(params, shared, tile, at);
    for (int block = end() - 1; block >= tile.block_begin; --block) {
      // Read ahead: the page table's latency is that of half a key tile's products.
      const BoxPlace next = box_place<Config>(params, tile, block - 1, lane);
      if constexpr (kOfKeys) {
        shared.k_empty[at.stage].wait(at.phase ^ 1);
        load_key_tile<Config>(params, params.k, tile, block, place, lane, policy, shared.k[at.stage],
                              shared.k_full[at.stage]);
      }
      if constexpr (kOfValues && Config::kGeneral && !Config::kFindsApart) {
        find_masks<Config>(params, shared, shared.tiles[slots.stage], block, masks_phase);
      }
      if constexpr (kOfValues && Config::kNarrow) {
        shared.raw_empty[at.stage].wait(at.phase ^ 1);
        load_key_tile<Config>(params, params.v, tile, block, place, lane, policy, shared.raw_v[at.stage],
                              shared.raw_full[at.stage]);
      } else if constexpr (kOfValues) {
        shared.v_empty[at.stage].wait(at.phase ^ 1);
        load_key_tile<Config>(params, params.v, tile, block, place, lane, policy, shared.v[at.stage],
                              shared.v_full[at.stage]);
      }
      at.advance();
      place = next;
    }
    __syncwarp();
    if (lane == 0) shared.tile_empty[slots.stage].arrive();
    slots.advance();
  }
}

}  // namespace fovea::kernels::cuda
