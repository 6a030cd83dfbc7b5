// SPDX-License-Identifier: Apache-2.0
// Blocks of 16 or 32 query rows over fp8 caches. Rows stay fp8 in shared memory; two warpgroups
// take key tiles in turn, and each makes f16 of them in registers, as left operands of both
// products: keys are rows of the scores, value columns rows of the output. While one weighs, the
// other multiplies; at the end of an item they join.
#pragma once

#include "kernels/cuda/sm90/mla_decode/narrow_fp8_config.cuh"
#include "kernels/cuda/sm90/mla_decode/narrow_fp8_epilogue.cuh"
#include "kernels/cuda/sm90/mla_decode/narrow_fp8_load.cuh"

namespace fovea::kernels::cuda {

// Four products of 16 columns each from 16 e4m3 of two rows; scales: f16 twice, of the rows.
template <class C>
__device__ __forceinline__ void widen_keys(const uint4& first, const uint4& second,
                                           const uint32_t (&scales)[2], uint32_t (&a)[16]) {
  const uint32_t low[4] = {first.x, first.y, first.z, first.w};
  const uint32_t high[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    widen_e4m3<C::kScaled>(low[step], scales[0], a[4 * step], a[4 * step + 2]);
    widen_e4m3<C::kScaled>(high[step], scales[1], a[4 * step + 1], a[4 * step + 3]);
  }
}

// The scores of a key tile, complete when it returns.
template <class C>
__device__ __forceinline__ void score_keys(typename C::SharedMemory& shared,
                                           const typename C::KeyRows& keys,
                                           float (&scores)[C::kRows / 2]) {
  using Scores = Product<C::kRows>;
  const int lane = threadIdx.x % 32;
  const uint4* rows[2] = {keys.rows[thread_row(0)], keys.rows[thread_row(1)]};
  uint32_t factors[C::kLatentParts][2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float scales[4] = {};
    if constexpr (C::kScaled) *reinterpret_cast<uint4*>(scales) = rows[r][C::kRank / 16];
#pragma unroll
    for (int part = 0; part < C::kLatentParts; ++part) {
      factors[part][r] = pack<f16>(scales[part] * kKeyFactor, scales[part] * kKeyFactor);
    }
  }
  // What a lane has of column tile t: 16 bytes of both rows, 32 of bf16 RoPE columns.
  uint4 raw[2][4];
  const auto load = [&](int t) {
    const bool wide = t == C::kLatentTiles && C::kScaled;
    const int piece = wide ? C::kRopeOffset / 16 + lane % 4 * 2 : t * 4 + lane % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      raw[t % 2][r] = rows[r][piece];
      if (wide) raw[t % 2][2 + r] = rows[r][piece + 1];
    }
  };
  uint32_t a[C::kBuffers][16];
  load(0);
#pragma unroll
  for (int t = 0; t < C::kLatentTiles + C::kRopeTiles; ++t) {
    uint32_t(&at)[16] = a[t % C::kBuffers];
    const uint4(&from)[4] = raw[t % 2];
    const bool rope = t == C::kLatentTiles;
    if (C::kAhead && t + 1 < C::kLatentTiles + C::kRopeTiles) load(t + 1);
    if (t >= C::kBuffers) products_wait<C::kBuffers - 1>();
    if (!C::kAhead && t > 0) load(t);
    if (rope && C::kScaled) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint4& low = from[r];
        const uint4& high = from[2 + r];
        const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          at[4 * step + r] = bf16_as<C::kRopeMath>(words[2 * step]);
          at[4 * step + 2 + r] = bf16_as<C::kRopeMath>(words[2 * step + 1]);
        }
      }
    } else {
      widen_keys<C>(from[0], from[1], factors[rope ? 0 : t / 2], at);
    }
    const uint64_t queries = rows_descriptor(shared_address(shared.q[t]));
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if (rope) {
        Scores::template run<C::kRopeMath, false>(scores, at + 4 * step, queries + 2 * step, true);
      } else {
        Scores::template run<C::kMath, false>(scores, at + 4 * step, queries + 2 * step,
                                              t + step > 0);
      }
    }
    products_commit();
  }
  products_wait<0>();
  products_landed(scores);
}

// Adds weights * values of a key tile, complete when it returns. A matrix of 8 keys and 8 pairs of
// columns, transposed, is a pair of keys and of columns a lane: rows i and i + 8 of the product are
// columns 2 i and 2 i + 1.
template <class C>
__device__ __forceinline__ void add_fp8_values(typename C::SharedMemory& shared,
                                               const typename C::KeyRows& keys, int group,
                                               float (&out)[C::kLatentTiles][C::kRows / 2]) {
  const int lane = threadIdx.x % 32;
  const uint64_t weights = rows_descriptor(shared_address(shared.weights[group]));
  const uint4* from = keys.rows[lane] + threadIdx.x % kWarpgroupThreads / 32;
  uint32_t raw[2][8];     // of column tile t: pairs of keys 8 i
  uint32_t scales[2][8];  // of their part
  const auto load = [&](int t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      load_matrices_transposed(reinterpret_cast<uint32_t(&)[4]>(raw[t % 2][4 * half]),
                               from + half * 32 * (C::kRowBytes / 16) + 4 * t);
    }
    if constexpr (C::kScaled) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (t % 2 > 0) break;
        scales[t / 2 % 2][i] =
            *reinterpret_cast<const uint32_t*>(&shared.scales[group][t / 2][8 * i + lane % 4 * 2]);
      }
    }
  };
  uint32_t a[C::kBuffers][16];
  load(0);
#pragma unroll
  for (int t = 0; t < C::kLatentTiles; ++t) {
    uint32_t(&at)[16] = a[t % C::kBuffers];
    if (C::kAhead && t + 1 < C::kLatentTiles) load(t + 1);
    if (t >= C::kBuffers) products_wait<C::kBuffers - 1>();
    if (!C::kAhead && t > 0) load(t);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      widen_e4m3<C::kScaled>(__byte_perm(raw[t % 2][i], 0, 0x3120), scales[t / 2 % 2][i], at[2 * i],
                             at[2 * i + 1]);
    }
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Product<C::kRows>::template run<C::kMath, false>(out[t], at + 4 * step, weights + 2 * step,
                                                       true);
    }
    products_commit();
  }
  products_wait<0>();
#pragma unroll
  for (int t = 0; t < C::kLatentTiles; ++t) products_landed(out[t]);
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

// The weights of a query row are a row of shared memory.
template <class C>
__device__ __forceinline__ void store_narrow_weights(uint16_t (&to)[C::kRows][kTileColumns],
                                                     const float (&scores)[C::kRows / 2]) {
  const int lane = threadIdx.x % 32;
  const int chunk = threadIdx.x % kWarpgroupThreads / 32 * 2 + lane / 8 % 2;
#pragma unroll
  for (int pair = 0; pair < C::kRows / 16; ++pair) {
    const float* s = scores + 8 * pair;
    const int row = 16 * pair + lane / 16 * 8 + lane % 8;
    const uint32_t words[4] = {pack<C::kMath>(s[0], s[1]), pack<C::kMath>(s[2], s[3]),
                               pack<C::kMath>(s[4], s[5]), pack<C::kMath>(s[6], s[7])};
    store_matrices_transposed(&to[row][(chunk ^ row % 8) * 8], words);
  }
}

// Scores to weights in shared memory, and the tile's scales beside them. One warpgroup, which meets
// twice: before the second time nobody has begun this tile's values, behind the first nobody still
// reads the last one's.
template <class C>
__device__ __forceinline__ void weigh_keys(typename C::SharedMemory& shared,
                                           const typename C::KeyRows& keys, float factor, int group,
                                           float (&scores)[C::kRows / 2], Fp8State<C>& state) {
  constexpr int kColumns = C::kRows / 4;
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int lane = thread % 32;
  const int warp = thread / 32;
  float most[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    most[i] = fmaxf(scores[score_of(i, 0)], scores[score_of(i, 1)]);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], step));
    }
    if (lane < 4) shared.maxima[group][warp][column_of(i)] = most[i];
  }
  named_barrier_wait(2 + group, kWarpgroupThreads);
  if (C::kScaled && thread < kTileKeys) {
    float scales[4];
    *reinterpret_cast<uint4*>(scales) = keys.rows[thread][C::kRank / 16];
#pragma unroll
    for (int part = 0; part < C::kLatentParts; ++part) {
      shared.scales[group][part][thread] =
          static_cast<uint16_t>(pack<f16>(scales[part] * kKeyFactor, 0));
    }
  }
  weigh_columns<C>(shared.maxima[group], factor, most, scores, state);
  store_narrow_weights<C>(shared.weights[group], scores);
  fence_async_proxy();
  named_barrier_wait(2 + group, kWarpgroupThreads);
}

// The tiles of one work item that are this warpgroup's: every second from `group`.
template <class C>
__device__ __forceinline__ void fp8_item(const MlaDecodeParams& params,
                                         typename C::SharedMemory& shared, const RowTile& tile,
                                         int group, uint32_t first_tile, uint32_t q_phase,
                                         Fp8State<C>& state) {
  const int tiles = tile.tiles;
  const int masked = tile.masked;
  const int keys = (tile.item.key_end - tile.item.key_begin - 1) % kTileKeys + 1;  // of the last
  const float factor = params.scale * cache_scale<C>(params) * kLog2E;
#pragma unroll
  for (float& most : state.most) most = kLowest;
  shared.q_full.wait(q_phase);
  arrange_queries<C>(shared);
  const uint32_t own = first_tile + group;
  Ring<C::kStages> ring = {static_cast<int>(own % C::kStages), own / C::kStages % 2};
  for (int left = tiles - 1 - group; left >= 0; left -= 2) {  // tiles after this one
    typename C::KeyRows& rows = shared.kv[ring.stage];
    shared.full[ring.stage].wait(ring.phase);
    if (left == 0 && keys < kTileKeys) clear_foreign_rows<C>(rows, keys, group);
    float scores[C::kRows / 2];
    score_keys<C>(shared, rows, scores);
    if (left < masked) hide_narrow_keys<C>(params, tile, left, scores);
    weigh_keys<C>(shared, rows, factor, group, scores, state);
    add_fp8_values<C>(shared, rows, group, state.out);
    release(shared.empty[ring.stage]);
    ring.advance(2);
  }
  release(shared.q_empty);
}

template <class C>
__device__ __forceinline__ void run_fp8(const MlaDecodeParams& params,
                                        typename C::SharedMemory& shared, int group) {
  TileReader<C> reader;
  uint32_t first_tile = 0;  // of the item, among all of the block
  uint32_t q_phase = 0;
  while (true) {
    const RowTile& tile = reader.take(shared);
    if (tile.tiles < 0) return;
    Fp8State<C> state = {};
    if (tile.tiles > 0) {
      fp8_item<C>(params, shared, tile, group, first_tile, q_phase, state);
      first_tile += tile.tiles;
      q_phase ^= 1;
    }
    join_groups<C>(params, shared, tile, group, state);
    reader.give_back(shared);
  }
}

template <int kRank, int kRope, Type kQuery, Loader kLoader, int kRows>
__device__ void NarrowFp8Config<kRank, kRope, kQuery, kLoader, kRows>::run(
    const MlaDecodeParams& params) {
  using C = NarrowFp8Config;
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(4);
    }
    for (int i = 0; i < kTileSlots; ++i) {
      shared.tile_full[i].init(1);
      shared.tile_empty[i].init(8 + 1);
    }
    shared.q_full.init(1);
    shared.q_empty.init(8);
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_kernel();
  allow_next_kernel();
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x / 32 == 0) {
      copy_fp8_rows<C>(params, shared);
    } else if (threadIdx.x == 32) {
      FirstWork first;
      first.read(params.ranges[blockIdx.x / C::kBlocks]);
      produce_queries<C>(params, shared, first, false);
    }
  } else {
    take_registers<kConsumerRegisters>();
    run_fp8<C>(params, shared, warpgroup - 1);
  }
}

}  // namespace fovea::kernels::cuda
