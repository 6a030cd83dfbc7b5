// SPDX-License-Identifier: Apache-2.0
// Blocks of 16 query rows: few heads, or one block's part of many. Eight warps: each computes the
// scores of 16 keys over every other column tile and weighs eight of them, then multiplies the
// values of its columns. mma.sync behind ldmatrix reads shared memory at 128 bytes a cycle, where
// products of a warpgroup read it at 64: with these a key tile took 3750 cycles (2026-11-22).
#pragma once

#include "kernels/cuda/sm90/mla_decode/sixteen_epilogue.cuh"

namespace fovea::kernels::cuda {

// A warp's part in the scores: keys 16 * group to + 15 of a tile, column tiles half, half + 2, ...
struct ScorePart {
  int group, half;
  __device__ __forceinline__ ScorePart()
      : group(threadIdx.x % kWarpgroupThreads / 32), half(threadIdx.x / kWarpgroupThreads - 1) {}
  // Of the tile's groups of eight keys that one whose weights are this warp's.
  __device__ __forceinline__ int chunk() const { return 2 * group + half; }
};

// Steps of 16 columns of a warp: of its latent tiles, and of its half of the RoPE tile.
template <class C>
constexpr int kLatentSteps = C::kLatentTiles / 2 * 4;
template <class C>
constexpr int kScoreSteps = kLatentSteps<C> + C::kRopeTiles * 2;

// The a operand of one step: 16 rows of 128 swizzled bytes, columns 16 * step to + 15.
__device__ __forceinline__ void load_row_step(uint32_t (&to)[4],
                                              const uint16_t (&from)[16][kTileColumns], int step) {
  const int lane = threadIdx.x % 32;
  const int row = lane % 16;
  load_matrices(to, &from[row][((2 * step + lane / 16) ^ row % 8) * 8]);
}

template <class C>
__device__ __forceinline__ void load_own_queries(const typename C::SharedMemory& shared,
                                                 const ScorePart& part,
                                                 uint32_t (&queries)[kScoreSteps<C>][4]) {
#pragma unroll
  for (int i = 0; i < kLatentSteps<C>; ++i) {
    load_row_step(queries[i], shared.q[i / 4 * 2 + part.half], i % 4);
  }
#pragma unroll
  for (int i = kLatentSteps<C>; i < kScoreSteps<C>; ++i) {
    load_row_step(queries[i], shared.q[C::kLatentTiles], 2 * part.half + i - kLatentSteps<C>);
  }
}

// The b operands of kSteps steps over the warp's keys: of keys 0 to 7, and 8 to 15, of its group.
using KeySteps = uint32_t[4][4];
template <int kSteps, int kTiles>
__device__ __forceinline__ void load_key_steps(KeySteps& to, const KeyTiles<kTiles>& keys, int tile,
                                               int first_step, int group) {
  const int lane = threadIdx.x % 32;
  const char* row =
      reinterpret_cast<const char*>(keys.groups[2 * group + lane / 16][tile][lane % 8]);
  const int chunk = lane / 8 % 2 ^ lane % 8;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    load_matrices(to[step], row + ((chunk ^ 2 * (first_step + step)) * 16));
  }
}

// sums[i % 2][j]: of steps i and of keys 8 j to 8 j + 7.
template <class C, int kSteps>
__device__ __forceinline__ void add_scores(const KeySteps& keys, const uint32_t (*queries)[4],
                                           float (&sums)[2][2][4]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    multiply_add<C::kQ>(sums[step % 2][0], queries[step], keys[step][0], keys[step][1]);
    multiply_add<C::kQ>(sums[step % 2][1], queries[step], keys[step][2], keys[step][3]);
  }
}

// The warp's part in the scores of the tile at `own`; what it does not weigh goes to the warp that
// does. Operands are read a stage ahead of the products.
template <class C>
__device__ __forceinline__ void score_keys(typename C::SharedMemory& shared, const ScorePart& part,
                                           Ring<C::kStages> own, const Ring<C::kRopeSlots>& rope,
                                           const uint32_t (&queries)[kScoreSteps<C>][4],
                                           float (&scores)[4]) {
  constexpr int kTileStages = 2 * C::kHalfStages;
  float sums[2][2][4] = {};
  KeySteps keys[2];
#pragma unroll
  for (int stage = 0; stage <= kTileStages; ++stage) {
    if (stage < kTileStages) {
      shared.full[own.stage].wait(own.phase);
      load_key_steps<4>(keys[stage % 2], shared.kv[own.stage], part.half, 0, part.group);
      own.advance();
    } else if constexpr (C::kRopeTiles > 0) {
      shared.rope_full[rope.stage].wait(rope.phase);
      load_key_steps<2>(keys[stage % 2], shared.rope[rope.stage], 0, 2 * part.half, part.group);
    }
    if (stage > 0) add_scores<C, 4>(keys[(stage - 1) % 2], queries + 4 * (stage - 1), sums);
  }
  if constexpr (C::kRopeTiles > 0) {
    release(shared.rope_empty[rope.stage]);
    add_scores<C, 2>(keys[kTileStages % 2], queries + kLatentSteps<C>, sums);
  }
  const int lane = threadIdx.x % 32;
  float given[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float first = sums[0][0][i] + sums[1][0][i];
    const float second = sums[0][1][i] + sums[1][1][i];
    scores[i] = part.half ? second : first;
    given[i] = part.half ? first : second;
  }
  *reinterpret_cast<float4*>(shared.given[part.half ^ 1][part.group][lane]) = {given[0], given[1],
                                                                               given[2], given[3]};
}

// The other half's columns are added, in the order of the halves.
template <class C>
__device__ __forceinline__ void join_given(const typename C::SharedMemory& shared,
                                           const ScorePart& part, float (&scores)[4]) {
  const float4 other =
      *reinterpret_cast<const float4*>(shared.given[part.half][part.group][threadIdx.x % 32]);
  scores[0] += other.x;
  scores[1] += other.y;
  scores[2] += other.z;
  scores[3] += other.w;
}

// As hide_keys.
__device__ __forceinline__ void hide_own_keys(const MlaDecodeParams& params, const RowTile& tile,
                                              int left, const ScorePart& part, float (&scores)[4]) {
  const int key = part.chunk() * 8 + threadIdx.x % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint64_t seen = seen_keys(params, tile, left, row_of(r)) >> key;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (!(seen >> c & 1)) scores[2 * r + c] = -infinity();
    }
  }
}

// Scores to weights, which all warps get through shared.weights; first: nothing is accumulated yet.
// All 256 threads.
template <class C>
__device__ __forceinline__ void weigh_own(typename C::SharedMemory& shared, const ScorePart& part,
                                          float factor, bool first, float (&scores)[4],
                                          SixteenState<C>& state) {
  float most[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    most[r] = fmaxf(scores[2 * r], scores[2 * r + 1]);
    most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
    most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 2));
    if (threadIdx.x % 4 == 0) shared.maxima[row_of(r)][part.chunk()] = most[r];
  }
  named_barrier_wait(kConsumersBarrier, kConsumerThreads);
  float rescale[2];
  bool moved = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const auto* warps = reinterpret_cast<const float4*>(shared.maxima[row_of(r)]);
    const float4 a = warps[0];
    const float4 b = warps[1];
    const float all =
        fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w))) *
        factor;
    const bool moves = all > state.most[r] + kMaximumLag;
    const float next = moves ? all : state.most[r];
    rescale[r] = exp2_fast(state.most[r] - next);
    state.most[r] = next;
    moved |= moves;
  }
  if (!first && __any_sync(~0u, moved)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) state.sum[r] *= rescale[r];
#pragma unroll
    for (auto& columns : state.out) {
#pragma unroll
      for (int i = 0; i < 4; ++i) columns[i] *= rescale[i / 2];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float one = exp2_fast(fmaf(scores[2 * r], factor, -state.most[r]));
    const float other = exp2_fast(fmaf(scores[2 * r + 1], factor, -state.most[r]));
    state.sum[r] += one + other;
    const int row = row_of(r);
    const int column = (part.chunk() ^ row % 8) * 8 + threadIdx.x % 4 * 2;
    *reinterpret_cast<uint32_t*>(&shared.weights[row][column]) = pack<C::kQ>(one, other);
  }
}

// The warp's columns as values.
template <class C>
struct OwnValues {
  int stage, tile, chunk;  // chunk: of 16 bytes in a row of the column tile
  __device__ __forceinline__ OwnValues() {
    const int column = consumer_warp() * C::kWarpColumns;
    stage = column / (C::kStageTiles * kTileColumns);
    tile = column / kTileColumns % C::kStageTiles;
    chunk = column % kTileColumns / 8;
  }
};

// Rows of the warp's values that no key of the item owns become zero: their weights are, yet what
// stands there may be no number.
template <class C>
__device__ __forceinline__ void clear_own_values(KeyTiles<C::kStageTiles>& keys,
                                                 const OwnValues<C>& own, int valid) {
  constexpr int kChunks = C::kWarpColumns / 8;
  for (int i = threadIdx.x % 32; i < (kTileKeys - valid) * kChunks; i += 32) {
    const int key = valid + i / kChunks;
    const int chunk = (own.chunk + i % kChunks) ^ key % 8;
    *reinterpret_cast<uint4*>(&keys.row(own.tile, key)[chunk * 8]) = uint4{};
  }
  fence_async_proxy();
  __syncwarp();
}

// Adds weights * values of the warp's columns. Operands are read a step ahead of the products.
template <class C>
__device__ __forceinline__ void add_own_values(const typename C::SharedMemory& shared,
                                               const KeyTiles<C::kStageTiles>& keys,
                                               const OwnValues<C>& own, SixteenState<C>& state) {
  constexpr int kSteps = kTileKeys / 16;
  constexpr int kPairs = C::kWarpColumns / 16;
  const int lane = threadIdx.x % 32;
  uint32_t weights[kSteps][4];
  uint32_t values[2][kPairs][4];
#pragma unroll
  for (int step = 0; step <= kSteps; ++step) {
    if (step < kSteps) {
      load_row_step(weights[step], shared.weights, step);
      const char* row =
          reinterpret_cast<const char*>(keys.groups[2 * step + lane / 8 % 2][own.tile][lane % 8]);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        load_matrices_transposed(values[step % 2][pair],
                                 row + ((own.chunk + 2 * pair + lane / 16) ^ lane % 8) * 16);
      }
    }
    if (step == 0) continue;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const auto& v = values[(step - 1) % 2][pair];
      multiply_add<C::kQ>(state.out[2 * pair], weights[step - 1], v[0], v[1]);
      multiply_add<C::kQ>(state.out[2 * pair + 1], weights[step - 1], v[2], v[3]);
    }
  }
}

// One work item with keys.
template <class C>
__device__ __forceinline__ void sixteen_item(const MlaDecodeParams& params,
                                             typename C::SharedMemory& shared, const RowTile& tile,
                                             SixteenProgress<C>& at, SixteenState<C>& state) {
  const ScorePart part;
  const OwnValues<C> own;
  const int tiles = tile.tiles;
  const int masked = tile.masked;
  const int keys = (tile.item.key_end - tile.item.key_begin - 1) % kTileKeys + 1;  // of the last
  const float factor = params.scale * kLog2E;
  shared.q_full.wait(at.q_phase);
  at.q_phase ^= 1;
  uint32_t queries[kScoreSteps<C>][4];
  load_own_queries<C>(shared, part, queries);
  release(shared.q_empty);
#pragma unroll 1
  for (int left = tiles - 1; left >= 0; --left) {  // tiles after this one
    float scores[4];
    score_keys<C>(shared, part, at.keys, at.rope, queries, scores);
    named_barrier_wait(kConsumersBarrier, kConsumerThreads);
    join_given<C>(shared, part, scores);
    if (left < masked) hide_own_keys(params, tile, left, part, scores);
    weigh_own<C>(shared, part, factor, left + 1 == tiles, scores, state);
    named_barrier_wait(kConsumersBarrier, kConsumerThreads);
    Ring<C::kStages> stage = at.keys;
    stage.advance(own.stage);
    auto& values = shared.kv[stage.stage];
    if (left == 0 && keys < kTileKeys) clear_own_values<C>(values, own, keys);
    add_own_values<C>(shared, values, own, state);
    release(shared.empty[stage.stage]);
    at.keys.advance(2 * C::kHalfStages);
    at.rope.advance();
  }
}

// The only item of a block in a cluster, if it has one.
template <class C>
__device__ __forceinline__ void run_sixteen_once(const MlaDecodeParams& params,
                                                 typename C::SharedMemory& shared) {
  SixteenProgress<C> at;
  TileReader<C> reader;
  const RowTile& tile = reader.take(shared);
  if (tile.tiles < 0) {
    pass_cluster();
    return;
  }
  const PartGroup group(params.work, tile);
  SixteenState<C> state;
  if (tile.tiles > 0) sixteen_item<C>(params, shared, tile, at, state);
  if (tile.item.partial < 0) {
    store_own<C>(params, shared, tile, state);
    pass_cluster();
    return;
  }
  put_down<C>(shared, group, state);
  fence_async_proxy();
  join_in_cluster<C>(params, tile, group, shared);
}

template <class C>
__device__ __forceinline__ void run_sixteen(const MlaDecodeParams& params,
                                            typename C::SharedMemory& shared) {
  if constexpr (C::kClusters) {
    run_sixteen_once<C>(params, shared);
    return;
  }
  SixteenProgress<C> at;
  TileReader<C> reader;
  OpenParts<C> open(params, shared);
  while (true) {
    const RowTile& tile = reader.take(shared);
    if (tile.tiles < 0) break;
    SixteenState<C> state;
    if (tile.tiles > 0) sixteen_item<C>(params, shared, tile, at, state);
    store_own<C>(params, shared, tile, state);
    open.count(tile);
    reader.give_back(shared);
  }
  open.join();
}

}  // namespace fovea::kernels::cuda
