// SPDX-License-Identifier: Apache-2.0
// Absorbed MLA decode on Hopper: 64 rows of packed (token, head) pairs a block against a latent
// cache whose rows are keys and, but for the RoPE columns, values too. Persistent blocks; where
// requests have 128 rows two neighbours work side by side on the same keys; over fp8 caches they
// are a cluster, whose producers convert half of the keys each and send them to the other.
//
//   warpgroup 0   producer: keys in half tiles L (columns 0..255) and R (256..511) and their RoPE
//                 columns; work items and queries. fp8 rows are converted on the way.
//   warpgroup 1   scores     | QK[j] | softmax[j] | QK[j+1]     | softmax[j+1] | QK[j+2]     | ...
//   warpgroup 2   values L                        | P[j]*VL[j]  |              | P[j+1]*VL[j+1] ...
//   warpgroup 3   values R                                      | P[j]*VR[j]   |             | ...
//
// Barriers: tile_full/tile_empty (work items, to all), full/empty of a stage (producer -> scores; a
// value warpgroup -> producer), rope_full/rope_empty, q_full/q_empty, weights_full/weights_empty
// (scores -> values and back), scores_done (scores -> values R). A stage of the ring carries half
// of the queries at the start of an item.
//
// Blocks of 16 rows, over fp8 caches of 32 too, have other roles behind the producer: sixteen.cuh,
// narrow_fp8.cuh.
#pragma once

#include "kernels/cuda/sm90/mla_decode/load_boxes.cuh"
#include "kernels/cuda/sm90/mla_decode/load_fp8.cuh"
#include "kernels/cuda/sm90/mla_decode/load_rows.cuh"
#include "kernels/cuda/sm90/mla_decode/mainloop.cuh"
#include "kernels/cuda/sm90/mla_decode/narrow_fp8.cuh"
#include "kernels/cuda/sm90/mla_decode/pair_join.cuh"
#include "kernels/cuda/sm90/mla_decode/sixteen.cuh"

namespace fovea::kernels::cuda {

// All threads of the producer: work items, queries, and keys row by row.
template <class C>
__device__ __forceinline__ void produce_rows(const MlaDecodeParams& params,
                                             typename C::SharedMemory& shared,
                                             const FirstWork& first) {
  Ring<C::kStages> ring;
  TileReader<C> reader;
  Ring<C::kChunks> chunk;
  Ring<C::kRopeSlots> rope;
  if (threadIdx.x == 0) {
    const int4 place = first.place;
    shared.next = {place.x + place.z, place.y, place.z, first.rank<C>(), {}};
    announce_tile<C>(params, shared, first.exists() ? &first.item : nullptr, reader.at,
                     first.rank<C>());
  }
  while (true) {
    const RowTile& tile = reader.take(shared);
    const int tiles = tile.tiles;
    if (tiles < 0) break;
    auto keys = find_keys<C>(params, {tile.item.request, tile.item.key_begin, tile.item.key_end});
    wait_for_previous_kernel();
    if (tiles > 0) {
      Ring<C::kStages> place = ring;
#pragma unroll
      for (int t = 0; t < C::kQueryStages; ++t) {
        shared.empty[place.stage].wait(place.phase ^ 1);
        place.advance();
      }
      if (threadIdx.x % (kWarpgroupThreads / C::kQueryWarps) == 0) {
        uint32_t& q_phase = shared.next.q_phase[threadIdx.x / 32];
        shared.q_empty.wait(q_phase ^ 1);
        q_phase ^= 1;
        const int rank = shared.next.rank;
        load_queries<C>(params, shared, tile.item, rank,
                        QueryPlace::of<C>(params, tile.item, rank, 0), ring);
      }
#pragma unroll
      for (int t = 0; t < C::kQueryStages; ++t) {
        if constexpr (C::kFp8) {
          release(shared.full[ring.stage]);
        } else {
          shared.full[ring.stage].arrive();
        }
        ring.advance();
      }
    }
    reader.give_back(shared);
    if (threadIdx.x == 0) {
      auto& next = shared.next;
      announce_tile<C>(params, shared,
                       next.index < next.end ? &params.work.items[next.index] : nullptr, reader.at,
                       next.rank);
      next.index += next.step;
    }
    if constexpr (C::kFp8) {
      convert_keys<C>(params, shared, keys, tiles, ring, chunk, rope.phase);
    } else {
      copy_keys<C>(params, shared, keys, tiles, ring, rope);
    }
  }
  commit_copies();
  wait_copies<0>();
}

// Beside pages a warp each for keys, for queries and all items but the first, and for that one:
// `first`, which all three have read.
template <class C>
__device__ __forceinline__ void run_producer(const MlaDecodeParams& params,
                                             typename C::SharedMemory& shared,
                                             const FirstWork& first) {
  const int warp = threadIdx.x / 32;
  if constexpr (C::kLoader != pages) {
    produce_rows<C>(params, shared, first);
  } else if (warp == 0) {
    produce_keys<C>(params, shared, first);
  } else if (threadIdx.x == 32) {
    produce_queries<C>(params, shared, first, true);
  } else if (threadIdx.x == 64 && first.exists()) {
    announce_tile<C>(params, shared, &first.item, {}, first.rank<C>());
  }
}

template <class C>
__device__ __forceinline__ void run_scores(const MlaDecodeParams& params,
                                           typename C::SharedMemory& shared) {
  Progress<C> at;
  TileReader<C> reader;
  while (true) {
    const RowTile& tile = reader.take(shared);
    if (tile.tiles < 0) return;
    if (tile.tiles > 0) {
      score_item<C>(params, shared, tile, at);
    } else {
      for (int half = 0; half < 2; ++half) store_lse<C>(params, tile, half, -infinity());
    }
    reader.give_back(shared);
  }
}

template <class C>
__device__ __forceinline__ void run_values(const MlaDecodeParams& params,
                                           typename C::SharedMemory& shared, int half) {
  Progress<C> at;
  TileReader<C> reader;
  while (true) {
    const RowTile& tile = reader.take(shared);
    if (tile.tiles < 0) return;
    float out[C::kValueColumns / 2] = {};
    float inverse[2] = {};
    value_item<C>(shared, tile.tiles, half, at, out, inverse);
    if constexpr (C::kPairs) {
      if (tile.paired) {  // the block's only item
        join_pair<C>(params, shared, tile, half, out, inverse);
        return;
      }
    }
    store_values<C>(params, tile, half, out, inverse);
    reader.give_back(shared);
  }
}

// Constants that the end of an item needs come from memory where a launch is the first to use them:
// they are asked for while nothing else is to do.
__device__ __forceinline__ void touch_constants(const MlaDecodeParams& params) {
  touch(params.out);
  touch(params.lse);
  touch(params.work.partial_out);
  touch(params.work.arrivals);
  touch(params.q_heads);
  touch(params.scale);
  touch(params.batch.mask.tree);
}

// Every launch brings maps of its own, which the copy engine has to read before its first box.
constexpr int kMapsThread = 96;  // of the producer's last warp
template <class C>
__device__ __forceinline__ void prefetch_maps(const MlaDecodeParams& params) {
  prefetch_tensor_map(params.q_latent_map);
  if constexpr (C::kLoader == pages) prefetch_tensor_map(params.cache_map);
  if constexpr (C::kRopeTiles > 0) {
    prefetch_tensor_map(params.q_rope_map);
    if constexpr (C::kLoader == pages) prefetch_tensor_map(params.cache_rope_map);
  }
}

template <int kRank, int kRope, Type kQuery, Type kCache, Loader kLoader, int kRows, int kBlocks,
          int kJoins>
__device__ void MlaDecodeConfig<kRank, kRope, kQuery, kCache, kLoader, kRows, kBlocks, kJoins>::run(
    const MlaDecodeParams& params) {
  using C = MlaDecodeConfig;
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
  constexpr int kListThreads = kLoader == pages ? 96 : 1;
  constexpr int kEarlyThreads = kLoader == pages ? kListThreads : kWarpgroupThreads;
  if (threadIdx.x == kMapsThread) prefetch_maps<C>(params);
  FirstWork first;
  if (threadIdx.x < kListThreads && params.list_settled) {
    first.read(block_range<C>(params));
  }
  if (threadIdx.x == kWarpgroupThreads) {
    for (int i = 0; i < kStages; ++i) {
      shared.full[i].init(kFullArrivals);
      shared.empty[i].init(kSixteen ? kConsumerWarps / (2 * kHalfStages) : 4 * kSharers);
    }
    for (int i = 0; i < kRopeSlots; ++i) {
      shared.rope_full[i].init(kFullArrivals);
      shared.rope_empty[i].init(kSixteen ? 8 : 4 * kSharers);
    }
    if constexpr (kClusters) shared.cluster.parts_full.init(1);
    for (int i = 0; i < kTileSlots; ++i) {
      shared.tile_full[i].init(1);
      shared.tile_empty[i].init(4 * kConsumers + kKeyWarps);
    }
    shared.q_full.init(1);
    shared.q_empty.init(kSixteen ? 8 : 4);
    if constexpr (kFp8) {
      for (auto& warp : shared.chunk_full) {
        for (TransactionBarrier& chunk : warp) chunk.init(1);
      }
    }
    if constexpr (!kSixteen) {
      for (int i = 0; i < kSlots; ++i) {
        shared.weights_full[i].init(4);
        shared.weights_empty[i].init(8);
      }
      for (int i = 0; i < 2; ++i) {
        shared.scores_done[i].init(4);
        shared.sums_full[i].init(4);
      }
      if constexpr (kPairs) {
        shared.pair.ready.init(4);
        shared.pair.full.init(1);
      }
    }
    fence_barrier_init();
  }
  if constexpr (kShares || kPairs) {
    meet_cluster();
  } else {
    __syncthreads();
  }
  if constexpr (kClusters) cluster_arrive_relaxed();  // barriers are ready for the other blocks
  if constexpr (kSixteen) touch_constants(params);
  // No launch starts before the one ahead of it lets it or has ended, and the plan's first
  // attention waited for list and page table before it let any: later ones find both complete, and
  // keys that the caller calls settled (boxes of them are copied at once). What others write (q,
  // the pass's own keys) is promised only after the wait. The warps of the producer wait when they
  // know what to copy.
  if (kFp8 || !params.list_settled || threadIdx.x >= kEarlyThreads) {
    wait_for_previous_kernel();
    allow_next_kernel();
  }
  if (threadIdx.x < kListThreads && !params.list_settled) {
    first.read(block_range<C>(params));
  }
  int warpgroup = threadIdx.x / kWarpgroupThreads;
  // Known to be uniform where a sixth less code comes of it.
  if constexpr (kPairs || kSixteen) warpgroup = __shfl_sync(~0u, warpgroup, 0);
  if constexpr (kSixteen) {
    if (warpgroup == 0) {
      give_registers<kSixteenProducerRegisters>();
      run_producer<C>(params, shared, first);
      if constexpr (kClusters) pass_cluster();
    } else {
      take_registers<kSixteenRegisters>();
      run_sixteen<C>(params, shared);
    }
  } else if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    run_producer<C>(params, shared, first);
  } else if (warpgroup == 1) {
    if constexpr (kFp8) {
      give_registers<kScoreRegisters>();  // of 128
    } else {
      take_registers<kScoreRegisters>();
    }
    run_scores<C>(params, shared);
  } else {
    take_registers<kValueRegisters>();
    run_values<C>(params, shared, warpgroup - 2);
  }
  if constexpr (kShares) meet_cluster();  // the other block may still arrive at barriers here
}

template <int kRank, int kRope, Type kQuery, Type kCache, Loader kLoader, int kRows, int kBlocks,
          int kJoins>
using Config =
    Select<(kCache == f8e4m3 && kRows < kTileRows),
           NarrowFp8Config<kRank, kRope, kQuery, kLoader, kRows>,
           MlaDecodeConfig<kRank, kRope, kQuery, kCache, kLoader, kRows, kBlocks, kJoins>>;

}  // namespace fovea::kernels::cuda
