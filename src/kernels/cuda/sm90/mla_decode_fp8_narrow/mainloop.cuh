// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup: every second key tile of an item.
#pragma once

#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/sm90/mla_decode_fp8_narrow/epilogue.cuh"
#include "kernels/cuda/sm90/mla_decode_fp8_narrow/load.cuh"
#include "kernels/cuda/sm90/mla_decode_fp8_narrow/softmax.cuh"

namespace fovea::kernels::cuda {

template <class C>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const MlaDecodeParams& params,
                                      typename C::SharedMemory& shared, int group)
      : params_(params), shared_(shared), group_(group) {}

  __device__ __forceinline__ void run() {
    while (true) {
      const RowTile& tile = reader_.take(shared_);
      if (tile.tiles < 0) return;
      Sums<C> sums = {};
      if (tile.tiles > 0) {
        compute(tile, sums);
        first_tile_ += tile.tiles;
        q_phase_ ^= 1;
      }
      GroupJoin<C>(params_, shared_, tile, group_).run(sums);
      reader_.give_back(shared_);
    }
  }

 private:
  using KeyRows = typename C::KeyRows;

  // Computes this warpgroup's key tiles of one work item: every second one from group_.
  __device__ __forceinline__ void compute(const RowTile& tile, Sums<C>& sums) {
    const int tiles = tile.tiles;
    const int masked = tile.masked_tiles;
    // Keys of the last tile.
    const int keys = (tile.item.key_end - tile.item.key_begin - 1) % kTileKeys + 1;
    const float factor = params_.scale * cache_scale<C>(params_) * kLog2E;
#pragma unroll
    for (float& max : sums.max) max = kLowest;
    shared_.q_full.wait(q_phase_);
    arrange_queries<C>(shared_);
    const uint32_t own = first_tile_ + group_;
    Ring<C::kStages> ring = {static_cast<int>(own % C::kStages), own / C::kStages % 2};
    for (int left = tiles - 1 - group_; left >= 0; left -= 2) {  // tiles after this one
      KeyRows& rows = shared_.kv[ring.stage];
      shared_.full[ring.stage].wait(ring.phase);
      if (left == 0 && keys < kTileKeys) clear_unowned_rows<C>(rows, keys, group_);
      float scores[C::kRows / 2];
      score_keys(rows, scores);
      if (left < masked) hide_keys<C>(params_, tile, left, scores);
      weigh_keys(rows, factor, scores, sums);
      add_values(rows, sums);
      release(shared_.empty[ring.stage]);
      ring.advance(2);
    }
    release(shared_.q_empty);
  }

  // Makes four products of 16 columns each from 16 e4m3 values of two rows. `scales` holds the f16
  // scale of each row twice.
  __device__ __forceinline__ static void widen_keys(const uint4& first, const uint4& second,
                                                    const uint32_t (&scales)[2],
                                                    uint32_t (&a)[16]) {
    const uint32_t low[4] = {first.x, first.y, first.z, first.w};
    const uint32_t high[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      widen_e4m3<C::kScaled>(low[step], scales[0], a[4 * step], a[4 * step + 2]);
      widen_e4m3<C::kScaled>(high[step], scales[1], a[4 * step + 1], a[4 * step + 3]);
    }
  }
  // The same from bf16 RoPE columns: 32 bytes of each of two rows.
  __device__ __forceinline__ static void take_rope(const uint4 (&from)[4], uint32_t (&a)[16]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4& low = from[r];
      const uint4& high = from[2 + r];
      const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        a[4 * step + r] = bf16_as<C::kRopeMath>(words[2 * step]);
        a[4 * step + 2 + r] = bf16_as<C::kRopeMath>(words[2 * step + 1]);
      }
    }
  }

  // Computes the scores of a key tile. Complete on return.
  __device__ __forceinline__ void score_keys(const KeyRows& keys,
                                             float (&scores)[C::kRows / 2]) const {
    constexpr int kTiles = C::kLatentTiles + C::kRopeTiles;
    const int lane = threadIdx.x % 32;
    const uint4* rows[2] = {keys.rows[thread_row(0)], keys.rows[thread_row(1)]};
    uint32_t factors[C::Row::kScales][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float scales[4] = {};
      if constexpr (C::kScaled) *reinterpret_cast<uint4*>(scales) = rows[r][C::kRank / 16];
#pragma unroll
      for (int part = 0; part < C::Row::kScales; ++part) {
        factors[part][r] = pack<f16>(scales[part] * kKeyFactor, scales[part] * kKeyFactor);
      }
    }
    // A lane's values of column tile t: 16 bytes of both rows, or 32 of bf16 RoPE columns.
    uint4 raw[2][4];
    const auto load = [&](int t) {
      const bool wide = t == C::kLatentTiles && C::kScaled;
      const int piece = wide ? C::Row::kRopeOffset / 16 + lane % 4 * 2 : t * 4 + lane % 4;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        raw[t % 2][r] = rows[r][piece];
        if (wide) raw[t % 2][2 + r] = rows[r][piece + 1];
      }
    };
    uint32_t a[C::kBuffers][16];
    load(0);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      uint32_t(&at)[16] = a[t % C::kBuffers];
      const uint4(&from)[4] = raw[t % 2];
      const bool rope = t == C::kLatentTiles;
      if (C::kReadsAhead && t + 1 < kTiles) load(t + 1);
      if (t >= C::kBuffers) products_wait<C::kBuffers - 1>();
      if (!C::kReadsAhead && t > 0) load(t);
      if (rope && C::kScaled) {
        take_rope(from, at);
      } else {
        widen_keys(from[0], from[1], factors[rope ? 0 : t / 2], at);
      }
      multiply_scores(at, t, scores);
    }
    products_wait<0>();
    products_landed(scores);
  }

  // Starts the products of column tile t.
  __device__ __forceinline__ void multiply_scores(const uint32_t (&a)[16], int t,
                                                  float (&scores)[C::kRows / 2]) const {
    using Scores = Product<C::kRows>;
    const uint64_t queries = rows_descriptor(shared_address(shared_.q[t]));
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if (t == C::kLatentTiles) {
        Scores::template run<C::kRopeMath, false>(scores, a + 4 * step, queries + 2 * step, true);
      } else {
        Scores::template run<C::kMath, false>(scores, a + 4 * step, queries + 2 * step,
                                              t + step > 0);
      }
    }
    products_commit();
  }

  // Turns scores into weights in shared memory, and stores the tile's scales next to them. The
  // warpgroup synchronises twice: at the first barrier it no longer reads the last tile's weights,
  // after the second it may read this tile's.
  __device__ __forceinline__ void weigh_keys(const KeyRows& keys, float factor,
                                             float (&scores)[C::kRows / 2], Sums<C>& sums) const {
    constexpr int kColumns = C::kRows / 4;
    const int thread = threadIdx.x % kWarpgroupThreads;
    const int lane = thread % 32;
    const int warp = thread / 32;
    float largest[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      largest[i] = fmaxf(scores[score_of(i, 0)], scores[score_of(i, 1)]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], step));
      }
      if (lane < 4) shared_.maxima[group_][warp][column_of(i)] = largest[i];
    }
    sync_warpgroup(group_);
    if (C::kScaled && thread < kTileKeys) {
      float scales[4];
      *reinterpret_cast<uint4*>(scales) = keys.rows[thread][C::kRank / 16];
#pragma unroll
      for (int part = 0; part < C::Row::kScales; ++part) {
        shared_.scales[group_][part][thread] =
            static_cast<uint16_t>(pack<f16>(scales[part] * kKeyFactor, 0));
      }
    }
    weigh_columns<C>(shared_.maxima[group_], factor, largest, scores, sums);
    store_weights<C>(shared_.weights[group_], scores);
    fence_async_proxy();
    sync_warpgroup(group_);
  }

  // Adds weights * values of a key tile. Complete on return. A transposed matrix of 8 keys and 8
  // pairs of columns gives each lane a pair of keys and of columns: rows i and i + 8 of the product
  // are columns 2 i and 2 i + 1.
  __device__ __forceinline__ void add_values(const KeyRows& keys, Sums<C>& sums) const {
    const int lane = threadIdx.x % 32;
    const uint64_t weights = rows_descriptor(shared_address(shared_.weights[group_]));
    const uint4* from = keys.rows[lane] + threadIdx.x % kWarpgroupThreads / 32;
    uint32_t raw[2][8];     // values of column tile t: pairs of keys 8 i
    uint32_t scales[2][8];  // scales of their 128 columns
    const auto load = [&](int t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load_matrices_transposed(reinterpret_cast<uint32_t(&)[4]>(raw[t % 2][4 * half]),
                                 from + half * 32 * (C::Row::kBytes / 16) + 4 * t);
      }
      if constexpr (C::kScaled) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (t % 2 > 0) break;
          scales[t / 2 % 2][i] = *reinterpret_cast<const uint32_t*>(
              &shared_.scales[group_][t / 2][8 * i + lane % 4 * 2]);
        }
      }
    };
    uint32_t a[C::kBuffers][16];
    load(0);
#pragma unroll
    for (int t = 0; t < C::kLatentTiles; ++t) {
      uint32_t(&at)[16] = a[t % C::kBuffers];
      if (C::kReadsAhead && t + 1 < C::kLatentTiles) load(t + 1);
      if (t >= C::kBuffers) products_wait<C::kBuffers - 1>();
      if (!C::kReadsAhead && t > 0) load(t);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        widen_e4m3<C::kScaled>(__byte_perm(raw[t % 2][i], 0, 0x3120), scales[t / 2 % 2][i],
                               at[2 * i], at[2 * i + 1]);
      }
      products_begin();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        Product<C::kRows>::template run<C::kMath, false>(sums.out[t], at + 4 * step,
                                                         weights + 2 * step, true);
      }
      products_commit();
    }
    products_wait<0>();
#pragma unroll
    for (int t = 0; t < C::kLatentTiles; ++t) products_landed(sums.out[t]);
  }

  const MlaDecodeParams& params_;
  typename C::SharedMemory& shared_;
  const int group_;
  TileReader<C> reader_;
  uint32_t first_tile_ = 0;  // first tile of the item among all key tiles of the block
  uint32_t q_phase_ = 0;
};

}  // namespace fovea::kernels::cuda
