// SPDX-License-Identifier: Apache-2.0
// Attention of few query rows over many keys, for Hopper. One CTA works through its part of the planned
// list; an item is up to 8 or 16 query rows of each of its kv heads against a range of keys. Warps are dealt
// to the heads, a head's tiles of keys go round its warps, and every warp is a pipeline of its own:
//
//   warp 0   | copy 0 | copy 8 | copy 16 | work 0, copy 24 | work 8, copy 32 | ...
//   warp 1   | copy 1 | copy 9 | copy 17 | work 1, copy 25 | work 9, copy 33 | ...
//
// Warps meet only where an item ends; their copies for the next items are on the way meanwhile.
#pragma once

#include "kernels/cuda/sm90/decode/epilogue.cuh"

namespace fovea::kernels::cuda {

__device__ inline TileMask tile_mask(const DecodeParams& params, const Tile& tile, int head) {
  const MaskParams& mask = params.batch.mask;
  const int first = tile.token_of(0);
  const int last = tile.token_of(tile.rows - 1);
  return {max(tile.item.key_begin, visible_keys(mask, tile.view, last, last).begin),
          min(tile.item.key_end, visible_keys(mask, tile.view, first, first).end), needs_predicate(mask),
          params.logit_cap > 0 || params.alibi_slopes != nullptr, head};
}

template <class C>
__device__ void settle_queries(const DecodeParams& params, const Tile& tile, int head, Queries<C>& queries,
                               Factors<C>& factors) {
  const float scale = params.scale * (params.logit_cap > 0 ? 1.0f : kLog2E);
  if constexpr (C::kFp8) {
    const float k_scale = scale * shared_scale(params.keys, params.keys.k_scale, tile.item.kv_head + head);
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

template <int kDim, int kDimV, int kRows, Type kQuery, Type kCache, int kWarpCount, int kTile,
          int kStageCount, int kCtas>
__device__ void DecodeConfig<kDim, kDimV, kRows, kQuery, kCache, kWarpCount, kTile, kStageCount,
                             kCtas>::run(const DecodeParams& params) {
  using C = DecodeConfig;
  extern __shared__ __align__(16) char dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
  const int warp = threadIdx.x / 32;
  const int group = params.batch.q_heads / params.batch.kv_heads;
  const DecodeRange range = params.list.ranges[blockIdx.x];
  if (range.begin == range.end) return;
  const auto tile_of = [&](const DecodeItem& item) {
    Tile tile;
    tile.item = item;
    tile.view = {item.request, item.q_begin, item.q_len, item.kv_len};
    tile.group = group;
    tile.rows = min(kRowTile, item.q_len * group - item.first_row);
    return tile;
  };

  Loader<C> loader(params, range);
  Tile tile = tile_of(range.first);
  allow_next_kernel();
  wait_for_previous_kernel();
  Queries<C> queries;
  queries.read(params, tile);
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) loader.copy_next(shared.stages[warp][s]);

  int stage = 0;
  for (int i = range.begin;;) {
    const int head = warp % tile.item.heads;
    Factors<C> factors;
    settle_queries<C>(params, tile, head, queries, factors);
    const TileMask mask = tile_mask(params, tile, head);

    Accumulator<C> acc;
    const int step = kWarps / tile.item.heads * kKeys;
    bool refill = false;  // the stage read last
    for (int key = tile.item.key_begin + warp / tile.item.heads * kKeys; key < tile.item.key_end; key += step) {
      const int last = stage == 0 ? kStages - 1 : stage - 1;
      if (refill) loader.copy_next(shared.stages[warp][last]);
      wait_copies<kStages - 1>();
      __syncwarp();
      attend_tile<C>(params, tile, mask, shared.stages[warp][stage], queries, factors, key, acc);
      __syncwarp();
      refill = true;
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    // The queries of the next item travel while this one is finished.
    const Tile done = tile;
    const bool more = ++i < range.end;
    if (more) {
      tile = tile_of(params.list.items[i]);
      queries.read(params, tile);
    }
    const int last = stage == 0 ? kStages - 1 : stage - 1;
    finish_item<C>(params, done, acc, refill ? last : -1, shared);
    if (!more) break;
    if (refill) loader.copy_next(shared.stages[warp][last]);
  }
  wait_copies<0>();
}

template <int kDim, int kDimV, int kRows, Type kQuery, Type kCache>
using Config = DecodeConfig<kDim, kDimV, kRows, kQuery, kCache, decode_warps(kDim, kDimV),
                            decode_keys<kDim, kDimV, kCache>(), kDecodeStages, 1>;

}  // namespace fovea::kernels::cuda
