// SPDX-License-Identifier: Apache-2.0
// The consumers: eight warps. Each computes the scores of 16 keys over every other column tile and
// weighs eight of these keys, then multiplies the values of its columns.
#pragma once

#include "kernels/cuda/sm90/mla_decode_16/epilogue.cuh"

namespace fovea::kernels::cuda {

// A warp's share of the scores: keys 16 * group to 16 * group + 15 of a tile, over column tiles
// half, half + 2, ...
struct ScoreShare {
  int group, half;
  __device__ __forceinline__ ScoreShare()
      : group(threadIdx.x % kWarpgroupThreads / 32), half(threadIdx.x / kWarpgroupThreads - 1) {}
  // The group of eight keys of the tile that this warp weighs.
  __device__ __forceinline__ int chunk() const { return 2 * group + half; }
};

// Where the columns that the warp multiplies as values are stored.
template <class C>
struct ValueShare {
  int stage, tile, chunk;  // chunk: of 16 bytes in a row of the column tile
  __device__ __forceinline__ ValueShare() {
    const int column = consumer_warp() * C::kWarpColumns;
    stage = column / (C::kStageTiles * kTileColumns);
    tile = column / kTileColumns % C::kStageTiles;
    chunk = column % kTileColumns / 8;
  }
};

// Loads the a operand of one step: 16 rows of 128 swizzled bytes, columns 16 * step to
// 16 * step + 15.
__device__ __forceinline__ void load_row_step(uint32_t (&to)[4],
                                              const uint16_t (&from)[16][kTileColumns], int step) {
  const int lane = threadIdx.x % 32;
  const int row = lane % 16;
  load_matrices(to, &from[row][((2 * step + lane / 16) ^ row % 8) * 8]);
}

// b operands of four steps, for keys 0 to 7 and 8 to 15 of a group.
using KeySteps = uint32_t[4][4];

template <class C>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const MlaDecodeParams& params,
                                      typename C::SharedMemory& shared)
      : params_(params), shared_(shared) {}

  __device__ __forceinline__ void run() {
    BlockJoin<C> join(params_, shared_);
    while (true) {
      const RowTile& tile = reader_.take(shared_);
      if (tile.tiles < 0) break;
      Sums<C> sums;
      if (tile.tiles > 0) compute(tile, sums);
      store_sums<C>(params_, shared_, tile, sums);
      join.count(tile);
      reader_.give_back(shared_);
    }
    join.run();
  }

  // A block in a cluster has at most one item.
  __device__ __forceinline__ void run_once() {
    const RowTile& tile = reader_.take(shared_);
    if (tile.tiles < 0) {
      pass_cluster();
      return;
    }
    const PartGroup group(params_.work, tile);
    Sums<C> sums;
    if (tile.tiles > 0) compute(tile, sums);
    if (tile.item.partial < 0) {
      store_sums<C>(params_, shared_, tile, sums);
      pass_cluster();
      return;
    }
    write_part<C>(shared_, group, sums);
    fence_async_proxy();
    ClusterJoin<C>(params_, shared_, tile, group).run();
  }

 private:
  // Steps of 16 columns of a warp: over its latent tiles, and over its half of the RoPE tile.
  static constexpr int kLatentSteps = C::kLatentTiles / 2 * 4;
  static constexpr int kScoreSteps = kLatentSteps + C::kRopeTiles * 2;
  using Queries = uint32_t[kScoreSteps][4];

  // Computes one work item that has keys.
  __device__ __forceinline__ void compute(const RowTile& tile, Sums<C>& sums) {
    const ScoreShare share;
    const ValueShare<C> values;
    const int tiles = tile.tiles;
    const int masked = tile.masked_tiles;
    // Keys of the last tile.
    const int keys = (tile.item.key_end - tile.item.key_begin - 1) % kTileKeys + 1;
    const float factor = params_.scale * kLog2E;
    shared_.q_full.wait(q_phase_);
    q_phase_ ^= 1;
    Queries queries;
    load_queries(share, queries);
    release(shared_.q_empty);
#pragma unroll 1
    for (int left = tiles - 1; left >= 0; --left) {  // tiles after this one
      float scores[4];
      score_keys(share, queries, scores);
      sync_consumers();
      add_given(share, scores);
      if (left < masked) hide_keys(tile, left, share, scores);
      weigh(share, factor, left + 1 == tiles, scores, sums);
      sync_consumers();
      Ring<C::kStages> stage = keys_;
      stage.advance(values.stage);
      auto& columns = shared_.kv[stage.stage];
      if (left == 0 && keys < kTileKeys) clear_unowned_values(columns, values, keys);
      add_values(columns, values, sums);
      release(shared_.empty[stage.stage]);
      keys_.advance(C::kTileStages);
      rope_.advance();
    }
  }

  __device__ __forceinline__ void load_queries(const ScoreShare& share, Queries& queries) const {
#pragma unroll
    for (int i = 0; i < kLatentSteps; ++i) {
      load_row_step(queries[i], shared_.q[i / 4 * 2 + share.half], i % 4);
    }
#pragma unroll
    for (int i = kLatentSteps; i < kScoreSteps; ++i) {
      load_row_step(queries[i], shared_.q[C::kLatentTiles], 2 * share.half + i - kLatentSteps);
    }
  }

  // Loads the b operands of kSteps steps over the warp's keys.
  template <int kSteps, int kTiles>
  __device__ __forceinline__ static void load_key_steps(KeySteps& to, const KeyTiles<kTiles>& keys,
                                                        int tile, int first_step, int group) {
    const int lane = threadIdx.x % 32;
    const char* row =
        reinterpret_cast<const char*>(keys.groups[2 * group + lane / 16][tile][lane % 8]);
    const int chunk = lane / 8 % 2 ^ lane % 8;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      load_matrices(to[step], row + ((chunk ^ 2 * (first_step + step)) * 16));
    }
  }

  // sums[i % 2][j] receives steps i over keys 8 j to 8 j + 7.
  template <int kSteps>
  __device__ __forceinline__ static void add_scores(const KeySteps& keys,
                                                    const uint32_t (*queries)[4],
                                                    float (&sums)[2][2][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      multiply_add<C::kQ>(sums[step % 2][0], queries[step], keys[step][0], keys[step][1]);
      multiply_add<C::kQ>(sums[step % 2][1], queries[step], keys[step][2], keys[step][3]);
    }
  }

  // Computes the warp's share of the scores of the next key tile. Scores that another warp weighs
  // go to that warp through shared memory. Operands are read one stage before their products.
  __device__ __forceinline__ void score_keys(const ScoreShare& share, const Queries& queries,
                                             float (&scores)[4]) {
    Ring<C::kStages> ring = keys_;
    float sums[2][2][4] = {};
    KeySteps keys[2];
#pragma unroll
    for (int stage = 0; stage <= C::kTileStages; ++stage) {
      if (stage < C::kTileStages) {
        shared_.full[ring.stage].wait(ring.phase);
        load_key_steps<4>(keys[stage % 2], shared_.kv[ring.stage], share.half, 0, share.group);
        ring.advance();
      } else if constexpr (C::kRopeTiles > 0) {
        shared_.rope_full[rope_.stage].wait(rope_.phase);
        load_key_steps<2>(keys[stage % 2], shared_.rope[rope_.stage], 0, 2 * share.half,
                          share.group);
      }
      if (stage > 0) add_scores<4>(keys[(stage - 1) % 2], queries + 4 * (stage - 1), sums);
    }
    if constexpr (C::kRopeTiles > 0) {
      release(shared_.rope_empty[rope_.stage]);
      add_scores<2>(keys[C::kTileStages % 2], queries + kLatentSteps, sums);
    }
    const int lane = threadIdx.x % 32;
    float given[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float first = sums[0][0][i] + sums[1][0][i];
      const float second = sums[0][1][i] + sums[1][1][i];
      scores[i] = share.half ? second : first;
      given[i] = share.half ? first : second;
    }
    *reinterpret_cast<float4*>(shared_.given[share.half ^ 1][share.group][lane]) = {
        given[0], given[1], given[2], given[3]};
  }

  // Adds the scores over the other half of the columns.
  __device__ __forceinline__ void add_given(const ScoreShare& share, float (&scores)[4]) const {
    const float4 other =
        *reinterpret_cast<const float4*>(shared_.given[share.half][share.group][threadIdx.x % 32]);
    scores[0] += other.x;
    scores[1] += other.y;
    scores[2] += other.z;
    scores[3] += other.w;
  }

  // Hides keys of the tile that `left` tiles follow from rows that do not see them.
  __device__ __forceinline__ void hide_keys(const RowTile& tile, int left, const ScoreShare& share,
                                            float (&scores)[4]) const {
    const int key = share.chunk() * 8 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint64_t seen = seen_keys(params_, tile, left, row_of(r)) >> key;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (!(seen >> c & 1)) scores[2 * r + c] = -infinity();
      }
    }
  }

  // Turns scores into weights, which reach all warps through shared_.weights. `first`: nothing is
  // accumulated yet. All consumer threads.
  __device__ __forceinline__ void weigh(const ScoreShare& share, float factor, bool first,
                                        float (&scores)[4], Sums<C>& sums) const {
    float largest[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = fmaxf(scores[2 * r], scores[2 * r + 1]);
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 1));
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 2));
      if (threadIdx.x % 4 == 0) shared_.maxima[row_of(r)][share.chunk()] = largest[r];
    }
    sync_consumers();
    float rescale[2];
    bool moved = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto* warps = reinterpret_cast<const float4*>(shared_.maxima[row_of(r)]);
      const float4 a = warps[0];
      const float4 b = warps[1];
      const float all =
          fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w))) *
          factor;
      const bool moves = all > sums.max[r] + kMaximumLag;
      const float next = moves ? all : sums.max[r];
      rescale[r] = exp2_fast(sums.max[r] - next);
      sums.max[r] = next;
      moved |= moves;
    }
    if (!first && __any_sync(~0u, moved)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) sums.sum[r] *= rescale[r];
#pragma unroll
      for (auto& columns : sums.out) {
#pragma unroll
        for (int i = 0; i < 4; ++i) columns[i] *= rescale[i / 2];
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float one = exp2_fast(fmaf(scores[2 * r], factor, -sums.max[r]));
      const float other = exp2_fast(fmaf(scores[2 * r + 1], factor, -sums.max[r]));
      sums.sum[r] += one + other;
      const int row = row_of(r);
      const int column = (share.chunk() ^ row % 8) * 8 + threadIdx.x % 4 * 2;
      *reinterpret_cast<uint32_t*>(&shared_.weights[row][column]) = pack<C::kQ>(one, other);
    }
  }

  // Clears the rows of the warp's values after the first `valid` keys: no key of the item owns
  // them, and 0 times NaN is NaN.
  __device__ __forceinline__ static void clear_unowned_values(KeyTiles<C::kStageTiles>& keys,
                                                              const ValueShare<C>& values,
                                                              int valid) {
    constexpr int kChunks = C::kWarpColumns / 8;
    for (int i = threadIdx.x % 32; i < (kTileKeys - valid) * kChunks; i += 32) {
      const int key = valid + i / kChunks;
      const int chunk = (values.chunk + i % kChunks) ^ key % 8;
      *reinterpret_cast<uint4*>(&keys.row(values.tile, key)[chunk * 8]) = uint4{};
    }
    fence_async_proxy();
    __syncwarp();
  }

  // Adds weights * values of the warp's columns. Operands are read one step before their products.
  __device__ __forceinline__ void add_values(const KeyTiles<C::kStageTiles>& keys,
                                             const ValueShare<C>& share, Sums<C>& sums) const {
    constexpr int kSteps = kTileKeys / 16;
    constexpr int kPairs = C::kWarpColumns / 16;
    const int lane = threadIdx.x % 32;
    uint32_t weights[kSteps][4];
    uint32_t values[2][kPairs][4];
#pragma unroll
    for (int step = 0; step <= kSteps; ++step) {
      if (step < kSteps) {
        load_row_step(weights[step], shared_.weights, step);
        const char* row = reinterpret_cast<const char*>(
            keys.groups[2 * step + lane / 8 % 2][share.tile][lane % 8]);
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          load_matrices_transposed(values[step % 2][pair],
                                   row + ((share.chunk + 2 * pair + lane / 16) ^ lane % 8) * 16);
        }
      }
      if (step == 0) continue;
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const auto& v = values[(step - 1) % 2][pair];
        multiply_add<C::kQ>(sums.out[2 * pair], weights[step - 1], v[0], v[1]);
        multiply_add<C::kQ>(sums.out[2 * pair + 1], weights[step - 1], v[2], v[3]);
      }
    }
  }

  const MlaDecodeParams& params_;
  typename C::SharedMemory& shared_;
  TileReader<C> reader_;
  Ring<C::kStages> keys_;
  Ring<C::kRopeSlots> rope_;
  uint32_t q_phase_ = 0;
};

}  // namespace fovea::kernels::cuda
