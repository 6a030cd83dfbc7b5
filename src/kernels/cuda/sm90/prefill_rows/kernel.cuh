// SPDX-License-Identifier: Apache-2.0
// Attention of many new tokens over paged or packed keys on Hopper. One persistent block per SM.
#pragma once

#include "kernels/cuda/sm90/prefill_rows/epilogue.cuh"
#include "kernels/cuda/sm90/prefill_rows/load.cuh"
#include "kernels/cuda/sm90/prefill_rows/load_rows.cuh"
#include "kernels/cuda/sm90/prefill_rows/mainloop.cuh"
#include "kernels/cuda/sm90/prefill_rows/transpose.cuh"

namespace fovea::kernels::cuda {

__device__ __forceinline__ void release(TransactionBarrier& empty) {
  if (threadIdx.x % 32 == 0) empty.arrive();
}

// The next tile's slot, which the consumer holds until drop_tile; null when the work is done.
template <class Config>
__device__ __forceinline__ const TileSlot* take_tile(typename Config::SharedMemory& shared,
                                                     Ring<kTileSlots>& tiles) {
  shared.tile_full[tiles.stage].wait(tiles.phase);
  const TileSlot* slot = &shared.tiles[tiles.stage];
  tiles.advance();
  return slot;
}

// The products of the last step have landed in out.
template <class Config>
__device__ __forceinline__ void finish_values(typename Config::SharedMemory& shared,
                                              int stage, Accumulators<Config>& acc) {
  products_wait<0>();
  products_landed(acc.out);
  release(shared.v_empty[stage]);
}

// Landed scores of a key tile to weights.
template <class Config, bool kFirst>
__device__ __forceinline__ void weigh_scores(const PrefillParams& params,
                                             typename Config::SharedMemory& shared,
                                             const RowTile& tile, int consumer, int block,
                                             Accumulators<Config>& acc) {
  if constexpr (Config::kWiden) scale_keys<Config>(params, shared, acc.scales.stage, acc.scores);
  transform_scores<Config>(params, tile, consumer, block, acc);
  mask_scores<Config>(params, shared, tile, consumer, block, acc);
  const float factor[2] = {score_factor<Config>(params, tile, 0),
                           score_factor<Config>(params, tile, 1)};
  softmax<Config, kFirst>(factor, acc);
  if constexpr (Config::kWiden) {
    const float shrink = scale_values<Config, kFirst>(params, shared, acc.scales.stage, acc.v_unit,
                                                      acc.scores);
    if (!kFirst && shrink != 1) {
      acc.rescale[0] *= shrink;
      acc.rescale[1] *= shrink;
      acc.grown = true;
    }
    acc.scales.advance();
  }
}

// The last scores of a row tile have landed.
template <class Config>
__device__ __forceinline__ void release_queries(typename Config::SharedMemory& shared, int consumer,
                                                int stage) {
  if constexpr (!Config::kQueryRegisters) release(shared.q_empty[stage][consumer]);
}

// A row tile whose out is complete in the accumulators but not stored: stored under the products of the
// next one.
struct FinishedTile {
  const TileSlot* slot = nullptr;  // null: there is none
  float mean[2];
};

template <class Config>
__device__ __forceinline__ void store_finished(const PrefillParams& params,
                                               typename Config::SharedMemory& shared, int consumer,
                                               const FinishedTile& finished,
                                               const Accumulators<Config>& acc) {
  store_rows<Config>(params, *finished.slot, consumer, finished.mean, acc);
  release(shared.tile_empty[finished.slot - shared.tiles]);
}

// Scores of key tile `block`, values of the one after it, which was the row tile's first if kFirst. Its
// softmax runs under the products of the other warpgroup: the two drift apart by half a step.
template <class Config, bool kFirst>
__device__ __forceinline__ void step(const PrefillParams& params, typename Config::SharedMemory& shared,
                                     int consumer, const RowTile& tile, int block, int q_stage,
                                     const FinishedTile& finished, Ring<Config::kStages>& k,
                                     Accumulators<Config>& acc) {
  // Values lag scores by one key tile.
  const Ring<Config::kStages> v = k.previous();
  if constexpr (!kFirst) {
    if constexpr (Config::kRotated) finish_values<Config>(shared, v.previous().stage, acc);
    rescale_out<Config>(acc);
  }
  pack_weights<Config>(acc);
  await_keys<Config>(shared.k_full[k.stage], k.phase);
  products_begin();
  start_scores<Config>(shared, consumer, q_stage, k.stage, acc);
  products_commit();
  if constexpr (kFirst) {
    if (uniform(finished.slot != nullptr)) {
      store_finished<Config>(params, shared, consumer, finished, acc);
    }
  }
  await_keys<Config>(shared.v_full[v.stage], v.phase);
  if constexpr (kFirst) {
    clear_last_keys<Config>(shared, v.stage, tile, tile.columns, consumer);
    products_begin();
    start_first_values<Config>(shared, v.stage, tile.columns, acc);
  } else {
    start_values<Config, 0, Config::kKeys>(shared, v.stage, true, acc);
  }
  products_commit();
  if constexpr (Config::kRotated) {
    products_wait<1>();
  } else {
    finish_values<Config>(shared, v.stage, acc);
  }
  products_landed(acc.scores);
  release(shared.k_empty[k.stage]);
  if (block == tile.block_begin) release_queries<Config>(shared, consumer, q_stage);
  k.advance();
  weigh_scores<Config, false>(params, shared, tile, consumer, block, acc);
}

template <class Config>
__device__ __forceinline__ void consume(const PrefillParams& params,
                                        typename Config::SharedMemory& shared, int consumer) {
  Accumulators<Config> acc;
  Ring<kTileSlots> tiles;
  Ring<Config::kStages> k;  // of the next key tile whose scores are due
  Ring<Config::kQueryStages> q;

  const TileSlot* slot = take_tile<Config>(shared, tiles);
  if (slot->request < 0) return;
  shared.q_full[q.stage][consumer].wait(q.phase);
  load_queries<Config>(shared, consumer, q.stage, acc);
  RowTile tile = row_tile<Config>(params, shared, *slot, consumer);
  await_keys<Config>(shared.k_full[k.stage], k.phase);
  products_begin();
  start_scores<Config>(shared, consumer, q.stage, k.stage, acc);
  products_commit();
  products_wait<0>();
  products_landed(acc.scores);
  release(shared.k_empty[k.stage]);
  k.advance();
  weigh_scores<Config, true>(params, shared, tile, consumer, tile.block_end - 1, acc);

  FinishedTile finished;
  while (true) {
    int block = tile.block_end - 1;
    const bool single = block == tile.block_begin;
    if (!single) {
      step<Config, true>(params, shared, consumer, tile, --block, q.stage, finished, k, acc);
      while (block > tile.block_begin) {
        step<Config, false>(params, shared, consumer, tile, --block, q.stage, finished, k, acc);
      }
      if constexpr (Config::kRotated) {
        finish_values<Config>(shared, k.previous().previous().stage, acc);
      }
      rescale_out<Config>(acc);
    }
    const Ring<Config::kStages> v = k.previous();
    pack_weights<Config>(acc);

    if (single) release_queries<Config>(shared, consumer, q.stage);
    q.advance();
    slot = take_tile<Config>(shared, tiles);
    const bool more = uniform(slot->request >= 0);
    if (more) {
      shared.q_full[q.stage][consumer].wait(q.phase);
      load_queries<Config>(shared, consumer, q.stage, acc);
      await_keys<Config>(shared.k_full[k.stage], k.phase);
    }
      // Without a next tile these scores are of nothing, and nobody reads them.
    products_begin();
    start_scores<Config>(shared, consumer, q.stage, k.stage, acc);
    products_commit();
    if (uniform(single && finished.slot != nullptr)) {
      store_finished<Config>(params, shared, consumer, finished, acc);
    }
    await_keys<Config>(shared.v_full[v.stage], v.phase);
    if (single) clear_last_keys<Config>(shared, v.stage, tile, Config::kKeys, consumer);
    clear_first_keys<Config>(shared, v.stage, tile, consumer);
    products_begin();
    start_values<Config, 0, Config::kKeys>(shared, v.stage, !single, acc);
    products_commit();
      finished.slot = tile.slot;
    finish_rows<Config>(params, tile, consumer, acc, finished.mean);
    RowTile next = tile;
    if (more) next = row_tile<Config>(params, shared, *slot, consumer);
    // Scales of keys leave no registers for weights of products in flight: 1500 bytes of spills.
    if constexpr (Config::kWiden) finish_values<Config>(shared, v.stage, acc);
    products_wait<1>();
    products_landed(acc.scores);
    if (more) {
      release(shared.k_empty[k.stage]);
      k.advance();
      weigh_scores<Config, true>(params, shared, next, consumer, next.block_end - 1, acc);
    }
    if constexpr (!Config::kWiden) finish_values<Config>(shared, v.stage, acc);
    if (!more) break;
    tile = next;
  }
  store_finished<Config>(params, shared, consumer, finished, acc);
}

template <int kDim, int kDimV, Type kQuery, Type kCache, Loader kLoad, Scores kScores>
__device__ void PrefillConfig<kDim, kDimV, kQuery, kCache, kLoad, kScores>::run(
    const PrefillParams& params) {
  using Config = PrefillConfig;
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQueryStages * kConsumers; ++i) {
      shared.q_full[0][i].init(1);
      shared.q_empty[0][i].init(4);
    }
    for (int i = 0; i < kStages; ++i) {
      shared.k_full[i].init(kRows ? kLoaderThreads : 1);
      shared.k_empty[i].init(4 * kConsumers);
      shared.v_full[i].init(kRows ? kLoaderThreads : kNarrow ? kTransposers : 1);
      shared.raw_full[i].init(1);
      shared.raw_empty[i].init(kTransposers);
      shared.v_empty[i].init(4 * kConsumers);
    }
    for (int i = 0; i < kTileSlots; ++i) {
      shared.tile_full[i].init(1);
      // Loaders of rows and transposers are done with a tile before consumers are.
      shared.tile_empty[i].init(4 * kConsumers + (kRows ? 0 : 1));
    }
    for (int i = 0; i < kPlaceSlots; ++i) {
      shared.places_full[i].init(kWiden ? 64 : 32);  // with copies of scales
      shared.places_empty[i].init(kLoaderWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    if constexpr (!kRows) {
      if (threadIdx.x == 32) take_tiles<Config>(params, shared);
      if (threadIdx.x < 32) copy_tiles<Config>(params, shared);
      if constexpr (kNarrow) {
        if (threadIdx.x >= 64) transpose_values<Config>(params, shared);
      }
    } else if (threadIdx.x / 32 == 1) {
      locate_rows<Config>(params, shared);
    } else {
      if constexpr (kWiden) {
        widen_rows<Config>(params, shared);
      } else {
        gather_rows<Config>(params, shared);
      }
    }
  } else {
    take_registers<kConsumerRegisters>();
    consume<Config>(params, shared, warpgroup - 1);
  }
}

}  // namespace fovea::kernels::cuda
