// SPDX-License-Identifier: Apache-2.0
// Attention for any NVIDIA GPU from sm_80. A CTA works through its part of the planned list; each
// item is a tile of query rows of one kv head against a range of keys.
//
//   stage 0: | copy K, V ------> | scores, softmax, P*V |
//   stage 1:          | copy K, V ------> | scores, softmax, P*V |
//
// cp.async fills stages while mma.sync works on another one; one barrier a tile keeps the warps
// together. The page of a key is read one tile before its copy starts.
#pragma once

#include "kernels/cuda/portable/attention/epilogue.cuh"

namespace fovea::kernels::cuda {

template <class C>
__device__ WarpKeys warp_keys(const AttentionParams& params, const Tile& tile) {
  const MaskParams& mask = params.batch.mask;
  const int first_row = warp_row<C>();
  const int last_row = min(first_row + 16 * C::kRowFragments, tile.rows) - 1;
  if (last_row < first_row) return {};
  const int first = tile.token_of(first_row);
  const int last = tile.token_of(last_row);
  const WorkItem& item = tile.item;
  Interval some = visible_keys(mask, tile.view, first, last);
  some = {max(some.begin, item.key_begin), min(some.end, item.key_end)};
  if (needs_predicate(mask)) return {some, {}};
  return {some,
          {max(item.key_begin, visible_keys(mask, tile.view, last, last).begin),
           min(item.key_end, visible_keys(mask, tile.view, first, first).end)}};
}

// Plans a warp's steps of the tile that begins with key `first`, two bits each: bit `step` is 1 if
// some row sees a key, bit kMaskedStep + step if not every row sees every key.
constexpr int kMaskedStep = 8;
template <class C>
__device__ uint32_t plan_steps(const typename C::SharedMemory& shared, int first) {
  constexpr int kSteps = C::kSplitsKeys ? 1 : C::kKeys / C::kWarpKeys;
  static_assert(kSteps <= kMaskedStep);
  const WarpKeys keys = shared.warp_keys[threadIdx.x / 32];
  uint32_t steps = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int begin = first + step * C::kWarpKeys + warp_key<C>();
    const int end = begin + C::kWarpKeys;
    if (begin < keys.some.end && end > keys.some.begin) steps |= 1u << step;
    if (begin < keys.all.begin || end > keys.all.end) steps |= 1u << (kMaskedStep + step);
  }
  return steps;
}

// Attends to keys [step, step + kWarpKeys) of the tile that begins with key `first`, or to a step
// of all warps if they split keys.
template <class C>
__device__ void attend_step(const AttentionParams& params, int first, int step, bool masked,
                            int stage, typename C::SharedMemory& shared, Accumulator<C>& sum) {
  const Tile& tile = shared.tile;
  first += step;
  const int ready = C::kConvert ? 0 : stage;  // fp8 rows are converted into the first stage
  const int scale_stage = C::kConvert ? stage : 0;
  uint32_t hidden = 0;
  if (masked) hidden = hidden_scores<C>(params, tile, shared.queries, first);
  Scores<C> scores;
  score_tile<C>(shared, ready, step, scores);
  const float factor = transform_scores<C>(params, tile, shared, &shared.k_scale[scale_stage][step],
                                           first, hidden, scores);
  softmax_tile<C>(sum, factor, scores);
  add_values<C>(params, shared, ready, step, &shared.v_scale[scale_stage][step], scores, sum);
}

template <class C>
__device__ void run_item(const AttentionParams& params, typename C::SharedMemory& shared) {
  const Tile& tile = shared.tile;
  const int begin = tile.item.key_begin / C::kKeys * C::kKeys;
  const int tiles = (tile.item.key_end - begin + C::kKeys - 1) / C::kKeys;
  const auto find = [&](int t) { return find_key<C>(params, tile, begin + t * C::kKeys); };
  KeyPlace found[C::kStages];
#pragma unroll
  for (int t = 0; t < C::kStages; ++t) found[t] = find(t);
  Accumulator<C> sum;
  if (threadIdx.x % 32 == 0) shared.warp_keys[threadIdx.x / 32] = warp_keys<C>(params, tile);
  if (threadIdx.x < C::kRowTile) {
    const QueryRow row = query_row<C>(params, tile, threadIdx.x);
    shared.queries[threadIdx.x] = row;
    if constexpr (C::kQ == f8e4m3) {
      const int64_t token = tile.view.q_begin + row.token;
      const int64_t at =
          token * params.q_scale_token_stride + row.head * params.q_scale_head_stride;
      shared.query_scale[threadIdx.x] =
          product_unit(params) * (params.q_scale ? params.q_scale[at] : 1.0f);
    }
  }
  __syncthreads();
  load_queries<C>(params, tile, shared);
#pragma unroll
  for (int t = 0; t < C::kStages - 1; ++t) {
    store_row<C>(params, tile, found[t], shared.rows[t % 2]);
    __syncthreads();
    if (t < tiles) load_keys<C>(params, tile, begin + t * C::kKeys, shared.rows[t % 2], t, shared);
    commit_copies();
  }
  store_row<C>(params, tile, found[C::kStages - 1], shared.rows[(C::kStages - 1) % 2]);

  int stage = 0;
  for (int t = 0; t < tiles; ++t) {
    wait_copies<C::kStages - 2>();
    __syncthreads();
    if (t == 0) convert_queries<C>(shared);
    const int ahead = t + C::kStages - 1;
    if (ahead < tiles) {
      load_keys<C>(params, tile, begin + ahead * C::kKeys, shared.rows[ahead % 2],
                   stage == 0 ? C::kStages - 1 : stage - 1, shared);
    }
    commit_copies();
    const KeyPlace next = find(ahead + 1);
    if constexpr (C::kConvert) widen_tile<C>(stage, shared);
    constexpr int kSteps = C::kSplitsKeys ? 1 : C::kKeys / C::kWarpKeys;
    const uint32_t steps = plan_steps<C>(shared, begin + t * C::kKeys);
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      if (!(steps >> step & 1)) continue;
      const bool masked = steps >> (kMaskedStep + step) & 1;
      attend_step<C>(params, begin + t * C::kKeys, step * C::kWarpKeys, masked, stage, shared, sum);
    }
    store_row<C>(params, tile, next, shared.rows[(ahead + 1) % 2]);
    if (++stage == C::kStages) stage = 0;
  }
  wait_copies<0>();
  store_tile<C>(params, tile, sum, shared);
}

template <int kDim, int kDimV, Type kQuery, Type kCache, int kRows>
using Config = AttentionConfig<kDim, kDimV, kQuery, kCache, kRows>;

template <int kDim, int kDimV, Type kQuery, Type kCache, int kRows>
__device__ void AttentionConfig<kDim, kDimV, kQuery, kCache, kRows>::run(
    const AttentionParams& params) {
  extern __shared__ __align__(16) char dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
  for (int i = params.work.cta_begin[blockIdx.x]; i < params.work.cta_end[blockIdx.x];
       i = shared.tile.index + 1) {
    __syncthreads();  // the preceding item is stored
    if (threadIdx.x == 0) {
      const WorkItem& item = params.work.items[i];
      const RequestView view = request_view(params.batch, item.request);
      const int group = params.batch.q_heads / params.batch.kv_heads;
      shared.tile = {i, item, view, group, min(kRows, view.q_len * group - item.first_row)};
    }
    __syncthreads();
    run_item<AttentionConfig>(params, shared);
  }
}

}  // namespace fovea::kernels::cuda
