// SPDX-License-Identifier: Apache-2.0
// The score warpgroup (scores and weights of a key tile) and the two value warpgroups (each half of
// the value columns).
#pragma once

#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/sm90/mla_decode/load.cuh"
#include "kernels/cuda/sm90/mla_decode/softmax.cuh"

namespace fovea::kernels::cuda {

template <class C>
struct ScoreState {
  float scores[kTileKeys / 2];
  uint32_t queries[C::kRegisterTiles * 16];
  ScoreRow rows[2];
};

// Whether latent columns of q are multiplied as they come.
template <class C>
constexpr bool kPlainQueries = C::kMath == C::kQ && !C::kScaled;

// Two latent values of q as C::kMath. f16 has five bits of exponent: queries give scaled keys four
// of theirs.
template <class C>
__device__ __forceinline__ uint32_t query_pair(uint32_t pair) {
  if constexpr (kPlainQueries<C>) return pair;
  constexpr float kFactor = C::kScaled ? 1 / kKeyFactor : 1;
  return pack<C::kMath>(to_float<C::kQ>(static_cast<uint16_t>(pair)) * kFactor,
                        to_float<C::kQ>(static_cast<uint16_t>(pair >> 16)) * kFactor);
}

// The tiles of q in shared memory, as query_pair. The score warpgroup, which meets here.
template <class C>
__device__ __forceinline__ void convert_queries(typename C::SharedMemory& shared) {
  if constexpr (kPlainQueries<C>) return;
  constexpr int kTiles = C::kQueryTiles - (C::kRopeMath == C::kQ ? C::kRopeTiles : 0);
  uint4* chunks = reinterpret_cast<uint4*>(shared.q);
#pragma unroll 1
  for (int i = threadIdx.x % kWarpgroupThreads; i < kTiles * C::kRows * 8; i += kWarpgroupThreads) {
    const uint4 q = chunks[i];
    chunks[i] = {query_pair<C>(q.x), query_pair<C>(q.y), query_pair<C>(q.z), query_pair<C>(q.w)};
  }
  fence_async_proxy();
  named_barrier_wait(1, kWarpgroupThreads);
}

// The tiles of q that live in registers, from stages of the ring.
template <class C>
__device__ __forceinline__ void take_queries(typename C::SharedMemory& shared,
                                             Ring<C::kStages>& ring, ScoreState<C>& state) {
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % kWarpgroupThreads / 32 * 16 + lane % 16;
#pragma unroll
  for (int t = 0; t < C::kRegisterTiles; ++t) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const int chunk = (step * 2 + lane / 16) ^ (row % 8);
      uint32_t(&to)[4] = reinterpret_cast<uint32_t(&)[4]>(state.queries[4 * (4 * t + step)]);
      load_matrices(to, &query_stage<C>(shared, ring.stage)[t % C::kStageTiles][row][chunk * 8]);
#pragma unroll
      for (uint32_t& pair : to) pair = query_pair<C>(pair);
    }
    if (t % C::kStageTiles == C::kStageTiles - 1 || t + 1 == C::kRegisterTiles) {
      // Bytes of the other block's keys must not count for this phase.
      if constexpr (C::kShares) shared.full[ring.stage].wait(ring.phase);
      release_stage<C>(shared.empty[ring.stage]);
      ring.advance();
    }
  }
}

// Rows copied one by one were written by ordinary means, which the tensor cores see behind a fence:
// one of the readers, for in writers it would wait for their copies in flight. Who converts fp8
// rows has none and fences itself: 2 % faster (2026-11-21).
template <class C>
__device__ __forceinline__ void see_copied_rows() {
  if constexpr (C::kLoader != pages && !C::kFp8) fence_async_proxy();
}

// The scores of one key tile, complete when it returns. The parts are taken as they arrive.
// first(): over fp8 caches called when the first one is there.
template <class C, typename First>
__device__ __forceinline__ void compute_scores(typename C::SharedMemory& shared,
                                               Ring<C::kStages> ring, uint32_t rope_phase,
                                               ScoreState<C>& state, First first) {
  using Scores = Product<kTileKeys>;
  const uint64_t queries = rows_descriptor(opaque(shared_address(shared.q)));
#pragma unroll
  for (int part = 0; part < 2 * C::kHalfStages; ++part) {
    const uint64_t keys = rows_descriptor(shared_address(&shared.kv[ring.stage]), C::kGroupBytes);
    shared.full[ring.stage].wait(ring.phase);
    if (C::kFp8 && part == 0) first();
    see_copied_rows<C>();
    products_begin();
#pragma unroll
    for (int step = 0; step < C::kStageTiles * 4; ++step) {
      const int tile = part * C::kStageTiles + step / 4;
      const uint64_t at = keys + (step / 4 * kGroupTileBytes + step % 4 * 32) / 16;
      if (tile < C::kRegisterTiles) {
        Scores::template run<C::kMath, false>(
            state.scores, state.queries + 4 * (4 * tile + step % 4), at, part + step > 0);
      } else {
        const int offset = (tile - C::kRegisterTiles) * kTileBytes + step % 4 * 32;
        Scores::template run<C::kMath, false>(state.scores, queries + offset / 16, at, true);
      }
    }
    ring.advance();
  }
  if constexpr (C::kRopeTiles > 0) {
    shared.rope_full[0].wait(rope_phase);
    see_copied_rows<C>();
    const uint64_t keys = rows_descriptor(shared_address(&shared.rope[0]));
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const int offset = step * 32;
      Scores::template run<C::kRopeMath, false>(
          state.scores, queries + ((C::kQueryTiles - 1) * kTileBytes + offset) / 16,
          keys + offset / 16, true);
    }
  }
  products_commit();
  products_wait<0>();
  products_landed(state.scores);
  if constexpr (C::kRopeTiles > 0) {
    release_stage<C>(shared.rope_empty[0]);
  }
}

// Rows of the values that no key of the item owns may hold anything, NaN too; a weight of 0 does
// not stop that.
template <class C>
__device__ __forceinline__ void clear_foreign_values(typename C::SharedMemory& shared,
                                                     Ring<C::kStages> ring, int valid) {
  named_barrier_wait(1, kWarpgroupThreads);  // all warps have read these rows as keys
  for (int part = 0; part < 2 * C::kHalfStages; ++part) {
    for (int i = threadIdx.x % kWarpgroupThreads; i < (kTileKeys - valid) * 8;
         i += kWarpgroupThreads) {
#pragma unroll
      for (int t = 0; t < C::kStageTiles; ++t) {
        *reinterpret_cast<uint4*>(&shared.kv[ring.stage].row(t, valid + i / 8)[i % 8 * 8]) =
            uint4{};
      }
    }
    ring.advance();
  }
}

template <class C>
__device__ __forceinline__ void store_lse(const MlaDecodeParams& params, const RowTile& tile,
                                          int half, float lse) {
  const int row = thread_row(half);
  if (threadIdx.x % 4 != 0 || row >= tile.rows) return;
  if (tile.item.partial >= 0) {
    params.work.partial_lse[part_row<C>(tile, row)] = lse;
  } else if (params.lse) {
    const int packed = tile.first_row + row;
    params.lse[static_cast<int64_t>(tile.view.q_begin) * params.q_heads + packed] = lse;
  }
}

// What plain fp8 elements are to be multiplied by: it is left to the scores and the output.
template <class C>
__device__ __forceinline__ float cache_scale(const MlaDecodeParams& params) {
  return C::kFp8 && !C::kScaled && params.cache_scale ? *params.cache_scale : 1;
}
// What sums of weighted values are to be multiplied by.
template <class C>
__device__ __forceinline__ float value_scale(const MlaDecodeParams& params) {
  return C::kScaled ? 1 / kKeyFactor : cache_scale<C>(params);
}

// Where a role is in the rings.
template <class C>
struct Progress {
  Ring<C::kStages> keys;
  Ring<C::kSlots> weights;
  Ring<2> scores, sums;
  uint32_t rope_phase = 0;
  uint32_t q_phase = 0;
};

// Sums become those of whole rows, which values are to be divided by.
template <class C>
__device__ __forceinline__ void finish_sums(const MlaDecodeParams& params,
                                            typename C::SharedMemory& shared, int item,
                                            ScoreState<C>& state) {
  const float scale = value_scale<C>(params);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float& sum = state.rows[half].sum;
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (threadIdx.x % 4 == 0)
      shared.inverse_sum[item][thread_row(half)] = sum > 0 ? scale / sum : 0;
  }
}

__device__ __forceinline__ float row_lse(const ScoreRow& row) {
  return row.sum > 0 ? (row.most + log2f(row.sum)) * kLn2 : -infinity();
}

template <class C>
__device__ __forceinline__ void score_item(const MlaDecodeParams& params,
                                           typename C::SharedMemory& shared, const RowTile& tile,
                                           Progress<C>& at) {
  const int lane = threadIdx.x % 32;
  const int masked = tile.masked;
  const float factor = params.scale * cache_scale<C>(params) * kLog2E;
  ScoreState<C> state;
#pragma unroll
  for (ScoreRow& row : state.rows) row = {kLowest, 0};
  shared.q_full.wait(at.q_phase);
  at.q_phase ^= 1;
  take_queries<C>(shared, at.keys, state);
  convert_queries<C>(shared);
  const auto hand_over = [&] {
    fence_async_proxy();
    release(shared.weights_full[at.weights.stage]);
    at.weights.advance();
    at.keys.advance(2 * C::kHalfStages);
    at.rope_phase ^= 1;
  };
  const auto let_values_run = [&] {  // half R of the tile before
    release(shared.scores_done[at.scores.stage]);
    at.scores.advance();
  };
  for (int left = tile.tiles - 1;; --left) {  // tiles after this one
    compute_scores<C>(shared, at.keys, at.rope_phase, state, let_values_run);
    if constexpr (!C::kFp8) let_values_run();
    if (left == 0 && lane == 0) {
      shared.q_empty.arrive();
      if constexpr (C::kPairs) {
        if (tile.paired) arrive_in_cluster(shared.pair.ready, cluster_rank() ^ 1);
      }
    }
    if (left < masked) hide_keys<C>(params, tile, left, state.scores);
    const int slot = at.weights.stage;
    float rescale[2] = {1, 1};
    bool moved;
    if constexpr (C::kFp8) {
      shared.weights_empty[slot].wait(at.weights.phase ^ 1);
      moved = weigh_unseen<C>(factor, left + 1 == tile.tiles, state.rows, state.scores,
                              shared.weights[slot], rescale);
    } else {
      moved = softmax(factor, state.rows, state.scores, rescale);
      shared.weights_empty[slot].wait(at.weights.phase ^ 1);
      store_weights<C>(shared.weights[slot], [&](int i) {
        return pack<C::kMath>(state.scores[2 * i], state.scores[2 * i + 1]);
      });
    }
    if (lane == 0) shared.rescaled[slot][threadIdx.x % kWarpgroupThreads / 32] = moved;
    if (moved && lane % 4 == 0) {
      shared.rescale[slot][thread_row(0)] = rescale[0];
      shared.rescale[slot][thread_row(1)] = rescale[1];
    }
    if (left == 0) {
      const int keys = (tile.item.key_end - tile.item.key_begin - 1) % kTileKeys + 1;
      if (keys < kTileKeys) clear_foreign_values<C>(shared, at.keys, keys);
      if constexpr (!C::kFp8) break;
    }
    hand_over();
    if (C::kFp8 && left == 0) break;
  }
  // Outside the loop where registers allow; sums and LSE behind what products wait for (2026-11-22:
  // 0.2 us each).
  if constexpr (!C::kFp8) hand_over();
  finish_sums<C>(params, shared, at.sums.stage, state);
  const bool paired = C::kPairs && tile.paired;
  if constexpr (C::kPairs) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (paired && lane % 4 == 0) shared.pair.lse[thread_row(half)] = row_lse(state.rows[half]);
    }
  }
  release(shared.sums_full[at.sums.stage]);
  at.sums.advance();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!paired) store_lse<C>(params, tile, half, row_lse(state.rows[half]));
  }
}

// The widest product that a kernel of 512 threads may name: the compiler holds instructions to the
// 128 registers a thread starts with.
constexpr int kProductColumns = 128;

// Adds weights * values of one key tile, complete when it returns.
template <class C>
__device__ __forceinline__ void add_values(typename C::SharedMemory& shared, int stage, int slot,
                                           float (&out)[C::kValueColumns / 2]) {
  static_assert(C::kHalfStages == 1);
  const uint64_t weights = rows_descriptor(shared_address(shared.weights[slot]));
  const uint64_t values =
      columns_descriptor(shared_address(&shared.kv[stage]), kGroupTileBytes, C::kGroupBytes);
  products_begin();
#pragma unroll
  for (int step = 0; step < kTileKeys / 16; ++step) {
#pragma unroll
    for (int part = 0; part < C::kValueColumns / kProductColumns; ++part) {
      Product<kProductColumns>::template run<C::kMath, true>(
          out + part * kProductColumns / 2, weights + step * 32 / 16,
          values + (step * 2 * C::kGroupBytes +
                    part * (kProductColumns / kTileColumns) * kGroupTileBytes) /
                       16,
          true);
    }
  }
  products_commit();
  products_wait<0>();
  products_landed(out);
}

// Accumulates the item's values; inverse: what each of the two rows is to be multiplied by.
template <class C>
__device__ __forceinline__ void value_item(typename C::SharedMemory& shared, int tiles, int half,
                                           Progress<C>& at, float (&out)[C::kValueColumns / 2],
                                           float (&inverse)[2]) {
  const int warp = threadIdx.x % kWarpgroupThreads / 32;
  if (tiles > 0) at.keys.advance(C::kQueryStages);
  const auto take_sums =
      [&] {  // before the last slot is free: sums are no further ahead than weights
        shared.sums_full[at.sums.stage].wait(at.sums.phase);
        inverse[0] = shared.inverse_sum[at.sums.stage][thread_row(0)];
        inverse[1] = shared.inverse_sum[at.sums.stage][thread_row(1)];
        at.sums.advance();
      };
  for (int t = 0; t < tiles; ++t) {
    const int slot = at.weights.stage;
    shared.weights_full[slot].wait(at.weights.phase);
    if (t > 0 && shared.rescaled[slot][warp]) {
      const float factors[2] = {shared.rescale[slot][thread_row(0)],
                                shared.rescale[slot][thread_row(1)]};
#pragma unroll
      for (int i = 0; i < C::kValueColumns / 2; ++i) out[i] *= factors[i / 2 % 2];
    }
    at.scores.advance();
    // The scores of the next tile are what everybody waits for, so only half of the values compete
    // with them; the other half runs beside the softmax that follows (2026-11-21: 6 % faster than
    // both at once; keeping both back takes stages from the next keys, 18 % slower). Converted keys
    // wait for free stages more than for products: there the scores only begin first, 1.2 % faster
    // than all at once (2026-11-22).
    if (half == 1 && t + 1 < tiles) shared.scores_done[at.scores.stage].wait(at.scores.phase);
    Ring<C::kStages> own = at.keys;
    if (half) own.advance();
    // The last ones in turn: the output of half L is on its way while R is multiplied
    // (2026-11-22: 33.4 instead of 33.9 us at 64 x 1k).
    const bool last = !C::kFp8 && t + 1 == tiles;
    if (last && half == 1) named_barrier_wait(4, 2 * kWarpgroupThreads);
    add_values<C>(shared, own.stage, slot, out);
    if (last && half == 0) named_barrier_wait(4, 2 * kWarpgroupThreads);
    if (t + 1 == tiles) take_sums();
    release_stage<C>(shared.empty[own.stage]);
    release(shared.weights_empty[slot]);
    at.weights.advance();
    at.keys.advance();
    at.keys.advance();
  }
}

}  // namespace fovea::kernels::cuda
