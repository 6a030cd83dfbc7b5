// SPDX-License-Identifier: Apache-2.0
// Takes row tiles from the list, with what their rows see of the keys. A producer warp.
#pragma once

#include "kernels/cuda/sm90/common/pair.cuh"
#include "kernels/cuda/sm90/common/slots.cuh"
#include "kernels/cuda/sm90/common/work_list.cuh"

namespace fovea::kernels::cuda {

// Reduces the row tile of a pair to the block's rows and key tiles; returns how many of the last
// key tiles only the other block needs. The blocks alternate in taking the later rows, so that both
// have as much to do.
template <class Config>
__device__ int leave_own_rows(const PrefillParams& params, int turn, WorkTile& work) {
  if (work.request < 0) return 0;
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

// Returns the key tiles within the work's that its rows, and those of a pair's other block, do not
// see.
template <class Config>
__device__ Interval hidden_tiles(const PrefillParams& params, const WorkTile& work) {
  const RequestView view = {work.request, work.q_begin, work.q_len, work.kv_len};
  const int tokens = (kGroupRows >> params.heads_shift) * Config::kConsumers;
  const int first = work.first_token - (Config::kPairs ? cluster_rank() * tokens : 0);
  const int last = min(first + Config::kBlocks * tokens, view.q_len) - 1;
  const Interval keys = hidden_keys(params.attention.batch.mask, view, first, last);
  const Interval tiles = {(keys.begin + Config::kKeys - 1) / Config::kKeys,
                          keys.end / Config::kKeys};
  return tiles.begin < tiles.end ? tiles : Interval{-1, -1};
}

template <class Config>
__device__ RowsView rows_view(const PrefillParams& params, const typename Config::Slot& slot,
                              int consumer) {
  const MaskParams& mask = params.attention.batch.mask;
  const WorkTile& work = slot.work;
  const RequestView view = slot_view<Config>(slot);
  const int tokens = kGroupRows >> params.heads_shift;
  const int first = min(work.first_token + consumer * tokens, work.q_len - 1);
  const int last = min(first + tokens, work.q_len) - 1;
  RowsView rows;
  int end;
  if constexpr (Config::kMasked) {
    const Interval open = open_keys(mask, view, first, last);
    rows = {open.begin, open.end, 0};
    end = keys_end(mask, view, first, last);
  } else {
    const Interval low = visible_keys(mask, view, first, first);
    const Interval high = visible_keys(mask, view, last, last);
    // Both ends grow with the token, for causal masks also if tokens stand before the first key.
    rows = {high.begin, mask.causal ? view.prefix() + first + 1 : low.end, 0};
    end = high.end;
    if (!mask.causal && low.end < end)
      rows.open_begin = kNoEnd;  // chunks: no key is seen by all rows
  }
  if constexpr (Config::kParts) {
    rows = {max(rows.open_begin, work.key_begin), min(rows.open_end, work.kv_len), 0};
    end = min(end, work.kv_len);
  }
  const int seen = end - (work.block_end - 1) * Config::kKeys;
  if constexpr (Config::kOwnEnds) {
    const int least = 1 - (work.block_end - 1 - work.block_begin) * Config::kKeys;
    rows.columns = min((max(seen, least) + kGrain<Config> - 1) & -kGrain<Config>, Config::kKeys);
  } else {
    rows.columns =
        min((max(seen, 1) + kGrain<Config> - 1) / kGrain<Config> * kGrain<Config>, Config::kKeys);
  }
  return rows;
}

// Takes tiles from the list into the ring of slots.
template <class Config>
struct TileTaker {
  const PrefillParams& params;
  typename Config::SharedMemory& shared;
  // The first tile of each block or pair has its number, unless some blocks begin late. With parts,
  // the block's tiles are a range.
  int n = Config::kParts      ? params.attention.work.cta_begin[blockIdx.x]
          : params.concurrent ? next()
                              : blockIdx.x / Config::kBlocks;
  Ring<kTileSlots> slots = {};

  __device__ __forceinline__ int next() const {
    const int taken = threadIdx.x % 32 == 0 ? atomicAdd(&params.order->taken, 1) : 0;
    return __shfl_sync(~0u, taken, 0);
  }

  // The first block of a pair takes the number for both.
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

  // Finds what the rows see through a mask; all lanes take part.
  __device__ __forceinline__ void view_tile(typename Config::Slot& slot) {
    const int lane = threadIdx.x % 32;
    if constexpr (Config::kSkips) {
      const Interval hidden = hidden_tiles<Config>(params, slot.work);
      const bool ends = hidden.begin <= slot.work.block_begin;  // no row sees keys before them
      __syncwarp();
      if (lane == 0) {
        if (ends) slot.work.block_begin = max(slot.work.block_begin, hidden.end);
        slot.hidden = ends ? Interval{-1, -1} : hidden;
      }
      __syncwarp();
    }
#pragma unroll 1
    for (int consumer = 0; consumer < Config::kConsumers; ++consumer) {
      const RowsView rows = rows_view<Config>(params, slot, consumer);
      if (lane == consumer) slot.rows[consumer] = rows;
    }
  }

  // Finds the keys of each token. Tokens past the request's end see what its last token sees.
  __device__ __forceinline__ void find_keys(typename Config::Slot& slot) {
    const WorkTile& work = slot.work;
    const RequestView view = {work.request, work.q_begin, work.q_len, work.kv_len};
    const int tokens = Config::kConsumers * kGroupRows >> params.heads_shift;
    for (int i = threadIdx.x % 32; i < tokens; i += 32) {
      const int token = min(work.first_token + i, work.q_len - 1);
      slot.keys[i] = visible_keys(params.attention.batch.mask, view, token, token);
    }
    __syncwarp();  // lane 0 tells the first consumer that all of it is written
  }

  // Takes the next tile and returns its work; without a request it marks the end of the list. Lanes
  // find what the consumers see.
  __device__ __forceinline__ const WorkTile& take() {
    const int lane = threadIdx.x % 32;
    shared.tile_empty[slots.stage].wait(slots.phase ^ 1);
    if constexpr (Config::kPairs) share_taken();
    typename Config::Slot& slot = shared.tiles[slots.stage];
    TileCut cut;
    int32_t partial = -1, request_keys = 0;
    WorkTile work;
    if constexpr (Config::kParts) {
      work = part_at<Config>(params, n, partial, request_keys);
    } else {
      work = work_at<Config>(params, *params.order, n, cut);
    }
    if constexpr (Config::kPasses) {
      const int passed = leave_own_rows<Config>(params, slots.stage, work);
      if (lane == 0) slot.passed = passed;
    }
    if (lane == 0) {
      slot.work = work;
      if constexpr (Config::kParts) {
        slot.partial = partial;
        slot.request_keys = request_keys;
      }
      if constexpr (Config::kSegments) slot.cut = cut;
    }
    __syncwarp();
    const bool more = work.request >= 0;
    if constexpr (kFindsKeys<Config>) {
      if (more) find_keys(slot);
    }
    if constexpr (Config::kMasked) {
      if (more) view_tile(slot);
    }
    if (lane < Config::kConsumers) {
      if (!Config::kMasked && more) slot.rows[lane] = rows_view<Config>(params, slot, lane);
      shared.tile_full[slots.stage].arrive();
    }
    slots.advance();
    return slot.work;
  }

  // Called after take() if there was a tile. Blocks that begin early wait: otherwise they would
  // take more than their share.
  __device__ __forceinline__ void claim_next() {
    if constexpr (kReadsAhead<Config>) await_inputs(params);
    if constexpr (Config::kParts) {
      ++n;
    } else if (!Config::kPairs || cluster_rank() == 0) {
      // Read again: a register that kept it would be one too many.
      const int blocks = Config::kBoxes && Config::kMasked ? grid_blocks_anew() : gridDim.x;
      n = next() + (params.concurrent ? 0 : blocks / Config::kBlocks);
    }
  }

  __device__ __forceinline__ void finish() {
    if constexpr (kReadsAhead<Config>) await_inputs(params);
    // The last block that runs out of work resets the counters.
    if (!Config::kParts && threadIdx.x % 32 == 0 &&
        atomicAdd(&params.order->finished, 1) == static_cast<int>(gridDim.x) - 1) {
      params.order->taken = 0;
      params.order->finished = 0;
    }
    // Ends this launch after the concurrent one, for what follows in the stream.
    if (params.concurrent && blockIdx.x == 0) wait_for_previous_kernel();
  }
};

}  // namespace fovea::kernels::cuda
