// SPDX-License-Identifier: Apache-2.0
// The score warpgroup: scores and weights of key tiles.
#pragma once

#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/sm90/mla_common/queries.cuh"
#include "kernels/cuda/sm90/mla_decode/epilogue.cuh"
#include "kernels/cuda/sm90/mla_decode/softmax.cuh"

namespace fovea::kernels::cuda {

// Releases a stage of keys, or of queries in their place, to all producers that fill it.
template <class C>
__device__ __forceinline__ void release_stage(TransactionBarrier& empty) {
  if constexpr (C::kShares) {
    __syncwarp();
    const uint32_t lane = threadIdx.x % 32;
    if (lane < C::kBlocks) arrive_in_cluster(empty, lane);
  } else {
    release(empty);
  }
}

template <class C>
class ScoreWarpgroup {
 public:
  __device__ __forceinline__ ScoreWarpgroup(const MlaDecodeParams& params,
                                            typename C::SharedMemory& shared)
      : params_(params), shared_(shared) {}

  __device__ __forceinline__ void run() {
    while (true) {
      const RowTile& tile = reader_.take(shared_);
      if (tile.tiles < 0) return;
      if (tile.tiles > 0) {
        score_item(tile);
      } else {
        for (int half = 0; half < 2; ++half) store_lse<C>(params_, tile, half, -infinity());
      }
      reader_.give_back(shared_);
    }
  }

 private:
  // A thread's registers for one work item.
  struct Item {
    float scores[kTileKeys / 2];
    uint32_t queries[C::kQueries.register_tiles * 16];
    float rescale[2];  // factors of the values accumulated so far
    ScoreRow rows[2];
  };

  __device__ __forceinline__ void score_item(const RowTile& tile) {
    const int lane = threadIdx.x % 32;
    const int masked = tile.masked_tiles;
    const float factor = params_.scale * cache_scale<C>(params_) * kLog2E;
    Item item;
#pragma unroll
    for (ScoreRow& row : item.rows) row = {kLowest, 0};
    shared_.q_full.wait(q_phase_);
    q_phase_ ^= 1;
    take_queries(item);
    convert_queries();
    for (int left = tile.tiles - 1;; --left) {  // tiles after this one
      compute_scores(item);
      if constexpr (!C::kFp8) start_values_of_half_r();
      if (left == 0 && lane == 0) {
        shared_.q_empty.arrive();
        if constexpr (C::kPairs) {
          if (tile.paired) arrive_in_cluster(shared_.pair.ready, cluster_rank() ^ 1);
        }
      }
      if (left < masked) hide_keys(params_, tile, left, item.scores);
      weigh(factor, tile, left, item);
      if (left == 0) {
        const int keys = (tile.item.key_end - tile.item.key_begin - 1) % kTileKeys + 1;
        if (keys < kTileKeys) clear_unowned_values(keys);
        if constexpr (!C::kFp8) break;
      }
      hand_over_weights();
      if (C::kFp8 && left == 0) break;
    }
    // Outside of the loop where registers allow it. Sums and LSE come after what products wait for.
    if constexpr (!C::kFp8) hand_over_weights();
    finish(tile, item);
  }

  // Reads the register tiles of q from stages of the ring.
  __device__ __forceinline__ void take_queries(Item& item) {
    constexpr int kTiles = C::kQueries.register_tiles;
    const int lane = threadIdx.x % 32;
    const int row = threadIdx.x % kWarpgroupThreads / 32 * 16 + lane % 16;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const int chunk = (step * 2 + lane / 16) ^ (row % 8);
        uint32_t(&to)[4] = reinterpret_cast<uint32_t(&)[4]>(item.queries[4 * (4 * t + step)]);
        load_matrices(to,
                      &query_stage<C>(shared_, keys_.stage)[t % C::kStageTiles][row][chunk * 8]);
#pragma unroll
        for (uint32_t& pair : to) pair = query_pair<C>(pair);
      }
      if (t % C::kStageTiles == C::kStageTiles - 1 || t + 1 == kTiles) {
        // Bytes of the other block's keys must not count for this phase.
        if constexpr (C::kShares) shared_.full[keys_.stage].wait(keys_.phase);
        release_stage<C>(shared_.empty[keys_.stage]);
        keys_.advance();
      }
    }
  }

  // Converts the tiles of q in shared memory as query_pair() does. Synchronises the warpgroup.
  __device__ __forceinline__ void convert_queries() {
    if constexpr (kPlainQueries<C>) return;
    constexpr int kTiles = C::kQueries.shared_tiles - (C::kRopeMath == C::kQ ? C::kRopeTiles : 0);
    uint4* chunks = reinterpret_cast<uint4*>(shared_.q);
#pragma unroll 1
    for (int i = threadIdx.x % kWarpgroupThreads; i < kTiles * C::kRows * 8;
         i += kWarpgroupThreads) {
      const uint4 q = chunks[i];
      chunks[i] = {query_pair<C>(q.x), query_pair<C>(q.y), query_pair<C>(q.z), query_pair<C>(q.w)};
    }
    fence_async_proxy();
    named_barrier_wait(score_warpgroup, kWarpgroupThreads);
  }

  // Rows copied one by one are ordinary writes, which the tensor cores see only after a fence. It
  // is one of the readers, since a fence of the writers would wait for their copies in flight. A
  // producer that converts fp8 rows has none in flight and fences itself.
  __device__ __forceinline__ static void see_copied_rows() {
    if constexpr (C::kKeys == rows) fence_async_proxy();
  }

  // Computes the scores of one key tile, taking its parts as they arrive. Complete on return.
  __device__ __forceinline__ void compute_scores(Item& item) {
    using Scores = Product<kTileKeys>;
    constexpr int kRegisterTiles = C::kQueries.register_tiles;
    Ring<C::kStages> ring = keys_;
    const uint64_t queries = rows_descriptor(opaque(shared_address(shared_.q)));
#pragma unroll
    for (int part = 0; part < C::kTileStages; ++part) {
      const uint64_t keys =
          rows_descriptor(shared_address(&shared_.kv[ring.stage]), shared_.kv[0].kGroupBytes);
      shared_.full[ring.stage].wait(ring.phase);
      if (C::kFp8 && part == 0) start_values_of_half_r();
      see_copied_rows();
      products_begin();
#pragma unroll
      for (int step = 0; step < C::kStageTiles * 4; ++step) {
        const int tile = part * C::kStageTiles + step / 4;
        const uint64_t at = keys + (step / 4 * kGroupTileBytes + step % 4 * 32) / 16;
        if (tile < kRegisterTiles) {
          Scores::template run<C::kMath, false>(
              item.scores, item.queries + 4 * (4 * tile + step % 4), at, part + step > 0);
        } else {
          const int offset = (tile - kRegisterTiles) * kTileBytes + step % 4 * 32;
          Scores::template run<C::kMath, false>(item.scores, queries + offset / 16, at, true);
        }
      }
      ring.advance();
    }
    if constexpr (C::kRopeTiles > 0) {
      shared_.rope_full[0].wait(rope_phase_);
      see_copied_rows();
      const uint64_t keys = rows_descriptor(shared_address(&shared_.rope[0]));
      products_begin();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const int offset = step * 32;
        Scores::template run<C::kRopeMath, false>(
            item.scores, queries + ((C::kQueries.shared_tiles - 1) * kTileBytes + offset) / 16,
            keys + offset / 16, true);
      }
    }
    products_commit();
    products_wait<0>();
    products_landed(item.scores);
    if constexpr (C::kRopeTiles > 0) release_stage<C>(shared_.rope_empty[0]);
  }

  // Lets value warpgroup R begin with the preceding key tile.
  __device__ __forceinline__ void start_values_of_half_r() {
    release(shared_.scores_done[scores_.stage]);
    scores_.advance();
  }

  // Stores the weights of the key tile that `left` tiles follow, and the factors of values
  // accumulated so far.
  __device__ __forceinline__ void weigh(float factor, const RowTile& tile, int left, Item& item) {
    const int lane = threadIdx.x % 32;
    const int slot = weights_.stage;
    item.rescale[0] = item.rescale[1] = 1;
    bool moved;
    if constexpr (C::kFp8) {
      shared_.weights_empty[slot].wait(weights_.phase ^ 1);
      moved = weigh_optimistically<C>(factor, left + 1 == tile.tiles, item.rows, item.scores,
                                      shared_.weights[slot], item.rescale);
    } else {
      moved = softmax(factor, item.rows, item.scores, item.rescale);
      shared_.weights_empty[slot].wait(weights_.phase ^ 1);
      store_weights<C>(shared_.weights[slot], [&](int i) {
        return pack<C::kMath>(item.scores[2 * i], item.scores[2 * i + 1]);
      });
    }
    if (lane == 0) shared_.rescaled[slot][threadIdx.x % kWarpgroupThreads / 32] = moved;
    if (moved && lane % 4 == 0) {
      shared_.rescale[slot][thread_row(0)] = item.rescale[0];
      shared_.rescale[slot][thread_row(1)] = item.rescale[1];
    }
  }

  // Clears the rows of the value tile after its `valid` keys: no key of the item owns them, and a
  // weight of 0 does not stop a NaN.
  __device__ __forceinline__ void clear_unowned_values(int valid) {
    Ring<C::kStages> ring = keys_;
    named_barrier_wait(score_warpgroup, kWarpgroupThreads);  // all warps have read them as keys
    for (int part = 0; part < C::kTileStages; ++part) {
      for (int i = threadIdx.x % kWarpgroupThreads; i < (kTileKeys - valid) * 8;
           i += kWarpgroupThreads) {
#pragma unroll
        for (int t = 0; t < C::kStageTiles; ++t) {
          *reinterpret_cast<uint4*>(&shared_.kv[ring.stage].row(t, valid + i / 8)[i % 8 * 8]) =
              uint4{};
        }
      }
      ring.advance();
    }
  }

  __device__ __forceinline__ void hand_over_weights() {
    fence_async_proxy();
    release(shared_.weights_full[weights_.stage]);
    weights_.advance();
    keys_.advance(C::kTileStages);
    rope_phase_ ^= 1;
  }

  // Hands the inverse sums of an item to the value warpgroups and stores its LSE.
  __device__ __forceinline__ void finish(const RowTile& tile, Item& item) {
    const int lane = threadIdx.x % 32;
    const float scale = value_scale<C>(params_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& sum = item.rows[half].sum;
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (lane % 4 == 0) {
        shared_.inverse_sum[sums_.stage][thread_row(half)] = sum > 0 ? scale / sum : 0;
      }
    }
    const bool paired = C::kPairs && tile.paired;
    if constexpr (C::kPairs) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (paired && lane % 4 == 0) {
          shared_.pair.lse[thread_row(half)] = row_lse(item.rows[half]);
        }
      }
    }
    release(shared_.sums_full[sums_.stage]);
    sums_.advance();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!paired) store_lse<C>(params_, tile, half, row_lse(item.rows[half]));
    }
  }

  const MlaDecodeParams& params_;
  typename C::SharedMemory& shared_;
  TileReader<C> reader_;
  Ring<C::kStages> keys_;
  Ring<C::kWeightSlots> weights_;
  Ring<2> scores_, sums_;
  uint32_t rope_phase_ = 0;
  uint32_t q_phase_ = 0;
};

}  // namespace fovea::kernels::cuda
