// SPDX-License-Identifier: Apache-2.0
// Attention for any NVIDIA GPU from sm_80. A CTA of four warps works through its part of the planned
// list; each item is 64 query rows of one kv head against a range of keys.
//
//   stage 0: | locate | copy K, V ------> | scores, softmax, P*V |
//   stage 1:          | locate | copy K, V ------> | scores ...
//
// cp.async fills one stage while mma.sync works on the other; the barriers are __syncthreads.
#pragma once

#include "kernels/cuda/portable/attention/epilogue.cuh"

namespace fovea::kernels::cuda {

template <int kDim, int kDimV, Type kQuery, Type kCache>
using Config = AttentionConfig<kDim, kDimV, kQuery, kCache>;

template <class C>
__device__ void run_item(const AttentionParams& params, const Tile& tile,
                         typename C::SharedMemory& shared) {
  const MaskParams& mask = params.batch.mask;
  const int lane_row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const QueryRow rows[2] = {query_row(params, tile, lane_row), query_row(params, tile, lane_row + 8)};
  // Keys every row of the tile sees need no mask.
  const int first_token = tile.token_of(0);
  const int last_token = tile.token_of(tile.rows - 1);
  const int open_begin = max(tile.item.key_begin, visible_keys(mask, tile.view, last_token, last_token).begin);
  const int open_end = min(tile.item.key_end, visible_keys(mask, tile.view, first_token, first_token).end);
  const bool predicate = needs_predicate(mask);

  const int begin = tile.item.key_begin / C::kKeys * C::kKeys;
  const int tiles = (tile.item.key_end - begin + C::kKeys - 1) / C::kKeys;
  Accumulator<C> sum;
  __syncthreads();  // the item before has read its last tile
  load_queries<C>(params, tile, shared);
  if (tiles > 0) locate_keys<C>(params, tile, begin, 0, shared);
  __syncthreads();
  if (tiles > 0) load_keys<C>(params, 0, shared);
  commit_copies();

  for (int t = 0; t < tiles; ++t) {
    const int stage = t % C::kStages;
    const int first = begin + t * C::kKeys;
    if (t + 1 < tiles) locate_keys<C>(params, tile, first + C::kKeys, 1 - stage, shared);
    __syncthreads();
    if (t + 1 < tiles) load_keys<C>(params, 1 - stage, shared);
    commit_copies();
    wait_copies<1>();
    __syncthreads();
    int ready = stage;
    if constexpr (C::kConvert) {
      widen_rows<C::kKv, C::kQ>(shared.raw_k[stage], shared.k[0]);
      widen_rows<C::kKv, C::kQ>(shared.raw_v[stage], shared.v[0]);
      __syncthreads();
      ready = 0;
    }
    float scores[C::kKeys / 8][4];
    score_tile<C>(shared, ready, scores);
    transform_scores<C>(params, tile, rows, shared.k_scale[stage], first, scores);
    if (predicate || first < open_begin || first + C::kKeys > open_end) {
      mask_scores<C>(params, tile, rows, first, predicate, scores);
    }
    softmax_tile<C>(sum, scores);
    add_values<C>(params, shared, ready, shared.v_scale[stage], scores, sum);
    __syncthreads();
  }
  wait_copies<0>();
  store_tile<C>(params, tile, sum);
}

template <int kDim, int kDimV, Type kQuery, Type kCache>
__device__ void AttentionConfig<kDim, kDimV, kQuery, kCache>::run(const AttentionParams& params) {
  extern __shared__ __align__(16) char dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
  const int group = params.batch.q_heads / params.batch.kv_heads;
  for (int i = params.work.cta_begin[blockIdx.x]; i < params.work.cta_end[blockIdx.x]; ++i) {
    Tile tile;
    tile.item = params.work.items[i];
    tile.view = request_view(params.batch, tile.item.request);
    tile.group = group;
    tile.rows = min(kRowTile, tile.view.q_len * group - tile.item.first_row);
    run_item<AttentionConfig>(params, tile, shared);
  }
}

}  // namespace fovea::kernels::cuda
