// SPDX-License-Identifier: Apache-2.0
// Blocks of 32 query rows: few heads. Keys are the rows of the
// products and query rows their columns, so nothing is computed for rows that are not there. Two
// warpgroups, one for each half of the value columns: each computes what its columns add to the
// scores, both add that up and weigh, each multiplies its values.
#pragma once

#include "kernels/cuda/sm90/mla_decode/join.cuh"
#include "kernels/cuda/sm90/mla_decode/narrow_epilogue.cuh"

namespace fovea::kernels::cuda {

// What the columns of one half add to the scores of a key tile, complete when it returns.
template <class C>
__device__ __forceinline__ void half_scores(typename C::SharedMemory& shared, int half,
                                            Ring<C::kStages> own, uint32_t rope_phase,
                                            float (&scores)[C::kRows / 2]) {
  constexpr int kQueryBytes = C::kRows * 128;
  using Scores = Product<C::kRows>;
  const uint64_t queries = rows_descriptor(shared_address(shared.q[half * C::kHalfTiles]));
#pragma unroll
  for (int part = 0; part < C::kHalfStages; ++part) {
    const uint64_t keys = rows_descriptor(shared_address(&shared.kv[own.stage]), C::kGroupBytes);
    shared.full[own.stage].wait(own.phase);
    see_copied_rows<C>();
    products_begin();
#pragma unroll
    for (int step = 0; step < C::kStageTiles * 4; ++step) {
      const int tile = part * C::kStageTiles + step / 4;
      Scores::template run<C::kQ, false>(
          scores, keys + (step / 4 * kGroupTileBytes + step % 4 * 32) / 16,
          queries + (tile * kQueryBytes + step % 4 * 32) / 16, part + step > 0);
    }
    own.advance();
  }
  if constexpr (C::kRopeTiles > 0) {  // half of these too: products of one half alone serialise all
    shared.rope_full[0].wait(rope_phase);
    see_copied_rows<C>();
    const uint64_t rope = rows_descriptor(shared_address(&shared.rope[0])) + half * 4;
    const uint64_t rope_queries =
        rows_descriptor(shared_address(shared.q[2 * C::kHalfTiles])) + half * 4;
    products_begin();
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      Scores::template run<C::kQ, false>(scores, rope + step * 2, rope_queries + step * 2, true);
    }
  }
  products_commit();
  products_wait<0>();
  products_landed(scores);
  if constexpr (C::kRopeTiles > 0) release(shared.rope_empty[0]);
}

// hide_keys with keys as rows.
template <class C>
__device__ __forceinline__ void hide_narrow_keys(const MlaDecodeParams& params, const RowTile& tile,
                                                 int left, float (&scores)[C::kRows / 2]) {
#pragma unroll
  for (int i = 0; i < C::kRows / 4; ++i) {
    const uint64_t seen = seen_keys(params, tile, left, column_of(i));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!(seen >> thread_row(half) & 1)) scores[score_of(i, half)] = -infinity();
    }
  }
}

// Rows of the values that no key of the item owns, as clear_foreign_values.
template <class C>
__device__ __forceinline__ void clear_foreign_half(typename C::SharedMemory& shared,
                                                   Ring<C::kStages> own, int valid) {
#pragma unroll
  for (int part = 0; part < C::kHalfStages; ++part) {
    for (int i = threadIdx.x % kWarpgroupThreads; i < (kTileKeys - valid) * 8;
         i += kWarpgroupThreads) {
#pragma unroll
      for (int t = 0; t < C::kStageTiles; ++t) {
        *reinterpret_cast<uint4*>(&shared.kv[own.stage].row(t, valid + i / 8)[i % 8 * 8]) = uint4{};
      }
    }
    own.advance();
  }
}

// The other half's share is added, in the order of the halves. All 256 threads.
template <class C>
__device__ __forceinline__ void join_scores(typename C::SharedMemory& shared, int half,
                                            float (&scores)[C::kRows / 2]) {
  const int thread = threadIdx.x % kWarpgroupThreads;
#pragma unroll
  for (int i = 0; i < C::kRows / 2; ++i) shared.scores[half][i][thread] = scores[i];
  named_barrier_wait(1, 2 * kWarpgroupThreads);
#pragma unroll
  for (int i = 0; i < C::kRows / 2; ++i) scores[i] += shared.scores[half ^ 1][i][thread];
}

// Scores to weights; both warpgroups have the same. All 256 threads.
template <class C>
__device__ __forceinline__ void weigh(typename C::SharedMemory& shared, float factor, int half,
                                      float (&scores)[C::kRows / 2], NarrowState<C>& state) {
  constexpr int kColumns = C::kRows / 4;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x % kWarpgroupThreads / 32;
  float most[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    most[i] = fmaxf(scores[score_of(i, 0)], scores[score_of(i, 1)]);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], step));
    }
    if (half == 0 && lane < 4) shared.maxima[warp][column_of(i)] = most[i];
  }
  named_barrier_wait(1, 2 * kWarpgroupThreads);
  weigh_columns<C>(shared.maxima, factor, most, scores, state);
}

// The weights of a query row are a row of shared memory. Each warpgroup stores its pairs of blocks.
template <class C>
__device__ __forceinline__ void store_narrow_weights(uint16_t (&to)[C::kRows][kTileColumns],
                                                     int half,
                                                     const float (&scores)[C::kRows / 2]) {
  const int lane = threadIdx.x % 32;
  const int chunk = threadIdx.x % kWarpgroupThreads / 32 * 2 + lane / 8 % 2;
#pragma unroll
  for (int pair = 0; pair < C::kRows / 16; ++pair) {
    if (pair % 2 != half) continue;
    const float* s = scores + 8 * pair;
    const int row = 16 * pair + lane / 16 * 8 + lane % 8;
    const uint32_t words[4] = {pack<C::kMath>(s[0], s[1]), pack<C::kMath>(s[2], s[3]),
                               pack<C::kMath>(s[4], s[5]), pack<C::kMath>(s[6], s[7])};
    store_matrices_transposed(&to[row][(chunk ^ row % 8) * 8], words);
  }
}

// Adds weights * values of one half of a key tile, complete when it returns.
template <class C>
__device__ __forceinline__ void add_half_values(typename C::SharedMemory& shared,
                                                Ring<C::kStages> own, NarrowState<C>& state) {
  const uint64_t weights = rows_descriptor(shared_address(shared.weights));
  Ring<C::kStages> at = own;
  products_begin();
#pragma unroll
  for (int part = 0; part < C::kHalfStages; ++part) {
    const uint64_t values = columns_descriptor(shared_address(&shared.kv[at.stage]), kGroupTileBytes, C::kGroupBytes);
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
#pragma unroll
      for (int t = 0; t < C::kStageTiles; ++t) {
        Product<C::kRows>::template run<C::kQ, false, true>(
            state.out[part * C::kStageTiles + t],
            values + (t * kGroupTileBytes + step * 2 * C::kGroupBytes) / 16, weights + step * 2, true);
      }
    }
    at.advance();
  }
  products_commit();
  products_wait<0>();
#pragma unroll
  for (int t = 0; t < C::kHalfTiles; ++t) products_landed(state.out[t]);
#pragma unroll
  for (int part = 0; part < C::kHalfStages; ++part) {
    release(shared.empty[own.stage]);
    own.advance();
  }
}

// One work item of the warpgroup for columns `half`.
template <class C>
__device__ __forceinline__ void narrow_item(const MlaDecodeParams& params,
                                            typename C::SharedMemory& shared, const RowTile& tile,
                                            int half, Progress<C>& at,
                                            NarrowState<C>& state) {
  const int tiles = tile.tiles;
  const int masked = tile.masked;
  const int keys = (tile.item.key_end - tile.item.key_begin - 1) % kTileKeys + 1;  // of the last
  const float factor = params.scale * kLog2E;
#pragma unroll
  for (float& most : state.most) most = kLowest;
  shared.q_full.wait(at.q_phase);
  at.q_phase ^= 1;
  for (int left = tiles - 1; left >= 0; --left) {  // tiles after this one
    Ring<C::kStages> own = at.keys;
    own.advance(half * C::kHalfStages);
    float scores[C::kRows / 2];
    half_scores<C>(shared, half, own, at.rope_phase, scores);
    if (left == 0) release(shared.q_empty);
    join_scores<C>(shared, half, scores);
    if (left < masked) hide_narrow_keys<C>(params, tile, left, scores);
    if (left == 0 && keys < kTileKeys) clear_foreign_half<C>(shared, own, keys);
    weigh<C>(shared, factor, half, scores, state);
    store_narrow_weights<C>(shared.weights, half, scores);
    fence_async_proxy();
    named_barrier_wait(1, 2 * kWarpgroupThreads);
    add_half_values<C>(shared, own, state);
    at.keys.advance(2 * C::kHalfStages);
    at.rope_phase ^= 1;
  }
}

template <class C>
__device__ __forceinline__ void run_narrow(const MlaDecodeParams& params,
                                           typename C::SharedMemory& shared, int half) {
  Progress<C> at;
  TileReader<C> reader;
  OpenParts<C> open(params, shared);
  while (true) {
    const RowTile& tile = reader.take(shared);
    if (tile.tiles < 0) break;
    NarrowState<C> state = {};
    if (tile.tiles > 0) narrow_item<C>(params, shared, tile, half, at, state);
    float inverse[C::kRows / 4];
    finish_columns<C>(params, shared, tile, half, state, inverse);
    store_half<C>(params, tile, half, state, inverse);
    open.count(tile);
    reader.give_back(shared);
  }
  open.join();
}

}  // namespace fovea::kernels::cuda
