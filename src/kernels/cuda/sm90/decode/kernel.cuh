// SPDX-License-Identifier: Apache-2.0
// Attention of few query rows over many keys, for Hopper. One CTA works through its part of the
// planned list; an item is up to 8 or 16 query rows of each of its kv heads against a range of
// keys. A step is one tile of keys for each computing warp: the warps are distributed over the
// item's heads, and the tiles of a head alternate between its warps. Further warps fill rings of
// steps with K and with V, across items:
//
//   copy K    | step 0 | step 1 | step 2 | step 3 ...           waits for k_empty
//   copy V    | step 0 | step 1 | step 2 | step 3 ...           waits for v_empty
//   warps     .........| 0      | 1      | 2     | join | 3 ... wait for k_full, v_full
//
// Warps synchronize only at the end of an item; the rings fill up meanwhile. If pages are too small
// for boxes, the computing warps copy their own keys.
#pragma once

#include "kernels/cuda/sm90/decode/epilogue.cuh"
#include "kernels/cuda/sm90/decode/load_boxes.cuh"
#include "kernels/cuda/sm90/decode/load_rows.cuh"

namespace fovea::kernels::cuda {

// Returns true if the predicate may hide keys that are older than the pass. Trees hide new keys
// only, and positions alone hide none.
__device__ inline bool hides_old_keys(const MaskParams& mask) {
  const bool by_position = mask.positions && (mask.window > 0 || mask.chunk > 0);
  return by_position || mask.custom || mask.spans || mask.item_prefix_lens;
}

template <class C>
__device__ TileMask tile_mask(const DecodeParams& params, const Tile& tile, int head) {
  const MaskParams& mask = params.batch.mask;
  const int first = tile.token_of(0);
  const int last = tile.token_of(tile.rows - 1);
  const int first_key = Steps<C>(tile.item).key_of(0, static_cast<int>(threadIdx.x) / 32);
  return {max(tile.item.key_begin, visible_keys(mask, tile.view, last, last).begin),
          min(tile.item.key_end, visible_keys(mask, tile.view, first, first).end),
          hides_old_keys(mask),
          needs_predicate(mask),
          modifies_scores(params),
          head,
          place_of_scale(params.batch, tile.item, first_key, head)};
}

template <class C>
__device__ void prepare_queries(const DecodeParams& params, const Tile& tile, int head,
                                Queries<C>& queries, Factors<C>& factors) {
  const float scale = score_unit(params);
  if constexpr (C::kFp8) {
    const float k_scale =
        scale * shared_scale(params.keys, params.keys.k_scale, tile.item.kv_head + head);
    float unit[C::kColumns];
    queries.normalise(unit);
#pragma unroll
    for (int n = 0; n < C::kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        factors.values[n][i] = k_scale * __shfl_sync(~0u, unit[n], (threadIdx.x % 4 * 2 + i) * 4);
      }
    }
  } else {
    factors.values[0][0] = factors.values[0][1] = scale;
  }
}

template <class C, bool kBoxes>
__device__ void consume(const DecodeParams& params, const DecodeItem& first_item,
                        typename C::SharedMemory& shared) {
  const int warp = threadIdx.x / 32;
  const int group = params.batch.q_heads / params.batch.kv_heads;
  const auto tile_of = [&](const DecodeItem& item) {
    Tile tile;
    tile.item = item;
    tile.view = {item.request, item.q_begin, item.q_len, item.kv_len};
    tile.group = group;
    tile.rows = min(C::kRowTile, item.q_len * group - item.first_row);
    return tile;
  };
  Tile tile = tile_of(first_item);
  // Other CTAs may send parts as soon as the barriers exist, if no copy of this CTA lands there.
  if (shared.cluster_units > 0 && !parts_in_rings<C>(shared)) cluster_arrive_relaxed();
  RowCopier<C, !kBoxes> rows(params, first_item, shared);
  rows.begin();
  wait_for_previous_kernel();
  Queries<C> queries;
  queries.read(params, tile);
  allow_next_kernel();

  Ring<C> ring;
  for (int i = shared.range_begin;;) {
    const bool more = ++i < shared.range_end;
    DecodeItem next = tile.item;
    if (more) next = params.list.items[i];
    const int head = Steps<C>(tile.item).head_of(warp);
    Factors<C> factors;
    prepare_queries<C>(params, tile, head, queries, factors);
    const TileMask mask = tile_mask<C>(params, tile, head);

    Accumulator<C> acc;
    const Steps<C> steps(tile.item);
#pragma unroll 1
    for (int step = steps.first; step < steps.end; step += steps.size()) {
      const int first = steps.key_of(step, warp);
      if (first < steps.end) {
        attend_tile<C, kBoxes>(params, tile, mask, shared, ring, queries, factors, first, acc);
      } else if (kBoxes) {
        // This warp has no keys in the step. If it did not wait for the step, its arrival would
        // count for the stage's preceding step, which other warps may still read.
        shared.k_full[ring.stage].wait(ring.phase);
        release(shared.k_empty[ring.stage]);
        shared.v_full[ring.stage].wait(ring.phase);
        release(shared.v_empty[ring.stage]);
      }
      if constexpr (!kBoxes) {
        __syncwarp();
        rows.copy_next();
      }
      ring.advance(shared.stages);
    }
    // The queries of the next item load while this one is finished.
    const Tile done = tile;
    if (more) {
      tile = tile_of(next);
      queries.read(params, tile);
    }
    finish_item<C>(params, done, acc, shared.cluster_units > 0 && done.item.partial >= 0, shared);
    if (!more) break;
  }
}

template <int kDim, int kDimV, int kRows, Type kQuery, Type kCache>
__device__ void DecodeConfig<kDim, kDimV, kRows, kQuery, kCache>::run(const DecodeParams& params) {
  using C = DecodeConfig;
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    const int of_scales = copies_scales_singly<C>(params) ? 32 : 0;
    for (int i = 0; i < kStages; ++i) {
      shared.k_full[i].init(kKSharers + of_scales);
      shared.v_full[i].init(kVSharers + of_scales);
      shared.k_empty[i].init(kWarps);
      shared.v_empty[i].init(kWarps);
    }
    shared.parts_full.init(1);
    fence_barrier_init();
  }
  // A launch starts only when the preceding one lets it or has ended, and the first attention of a
  // plan waits for the list and the page table before it lets the next launch start. So list and
  // page table are complete in the L2 when a later attention starts, whatever is launched between,
  // and are read from there. Other inputs (q, the pass's own keys, and all keys unless they are
  // promised to be written before this pass) are complete only after the wait.
  if (!params.plan_complete) wait_for_previous_kernel();
  const DecodeRange range = read_planned(params.list.ranges + blockIdx.x);
  if (range.begin == range.end) return wait_for_previous_kernel();
  if (threadIdx.x == 0) {
    shared.range_begin = range.begin;
    shared.range_end = range.end;
    shared.cluster_units = range.cluster_units;
    shared.stages = stage_count<C>(params, range);
  }
  __syncthreads();
  if (warp >= kWarps) {
    if constexpr (kMovesRegisters) give_registers<kCopierRegisters>();
    const int copier = warp - kWarps;
    const bool is_k = copier < kKSharers;
    if (params.boxes && copier < kKSharers + kVSharers) {
      BoxCopier<C>(params, side_of<C>(params, shared, is_k), is_k ? copier : copier - kKSharers)
          .run(range.first, shared.range_begin, shared.range_end, shared.stages,
               reads_ahead<C>(params, range));
    }
  } else {
    if constexpr (kMovesRegisters) take_registers<kConsumerRegisters>();
    if (params.boxes) {
      consume<C, true>(params, range.first, shared);
    } else {
      consume<C, false>(params, range.first, shared);
    }
  }
}

template <int kDim, int kDimV, int kRows, Type kQuery, Type kCache>
using Config = DecodeConfig<kDim, kDimV, kRows, kQuery, kCache>;

}  // namespace fovea::kernels::cuda
