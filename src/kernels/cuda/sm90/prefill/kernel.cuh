// SPDX-License-Identifier: Apache-2.0
// Attention of many new tokens over paged or packed keys on Hopper. One persistent block per SM.
//
//   warpgroup 0, the producer: each warp has roles of its own
//              pages, pairs              fp8 products              boxes                 rows
//     warp 0   K                         K and V                   widens K, V; q        copies K, V; q
//     warp 1   row tiles and q           row tiles, q, plain out   row tiles, K, V       row tiles, places of rows
//     warp 2   V                         transposes V              widens K, V           copies K, V
//     warp 3   joins | masks | plain out transposes V              widens K, V           copies K, V
//   tokens: as rows, but warp 1 brings q and entries of the page table
//   warpgroups 1 to 3, consumers of 64 query rows each: mainloop.cuh
//
// Warp 3 beside pages joins partial results where segments are summed, else finds masks if scores are masked, else
// stores out of pairs at head dim 128. Masks that it does not find are found by the warp that brings V or finds rows.
// The queries of kQueryRing come with K.
#pragma once

#include "kernels/cuda/sm90/prefill/eight_rows.cuh"
#include "kernels/cuda/sm90/prefill/epilogue.cuh"
#include "kernels/cuda/sm90/prefill/load.cuh"
#include "kernels/cuda/sm90/prefill/load_fp8.cuh"
#include "kernels/cuda/sm90/prefill/load_rows.cuh"
#include "kernels/cuda/sm90/prefill/load_tokens.cuh"
#include "kernels/cuda/sm90/prefill/step.cuh"
#include "kernels/cuda/sm90/prefill/transpose.cuh"

namespace fovea::kernels::cuda {

// The next tile's slot, which the consumer holds until it arrives at tile_empty.
template <class Config>
__device__ __forceinline__ const TileSlot* take_tile(typename Config::SharedMemory& shared,
                                                     Ring<kTileSlots>& tiles) {
  shared.tile_full[tiles.stage].wait(tiles.phase);
  const TileSlot* slot = &shared.tiles[tiles.stage];
  tiles.advance();
  return slot;
}

// Of the row tile.
template <class Config>
__device__ __forceinline__ int slot_number(const typename Config::SharedMemory& shared, const RowTile& tile) {
  return static_cast<int>(static_cast<const typename Config::Slot*>(tile.slot) - shared.tiles);
}

// What the consumer keeps of a tile whose queries are there.
template <class Config>
__device__ __forceinline__ RowTile begin_tile(const PrefillParams& params,
                                              const typename Config::SharedMemory& shared,
                                              const TileSlot& slot, int consumer, const ScoreUnits& units) {
  RowTile tile = row_tile<Config>(params, slot, consumer, units);
  if constexpr (Config::kSegments) keep_first_segment<Config>(tile);
  scale_rows<Config>(params, shared, consumer, tile);
  // Caps leave no registers for them.
  if constexpr (Config::kTransforms && !Config::kCaps) find_slopes<Config>(params, consumer, tile);
  return tile;
}

// Waits for a row tile's queries and takes them into registers where they are read from there.
template <class Config>
__device__ __forceinline__ void take_queries(typename Config::SharedMemory& shared, int consumer,
                                             const Ring<Config::kQueryStages>& q, Ring<Config::kKeyStages>& k,
                                             Accumulators<Config>& acc) {
  if constexpr (Config::kQueryRing) {
    shared.k_full[k.stage].wait(k.phase);
    load_queries<Config>(shared, consumer, k.stage, acc);
    release_stage<Config>(shared.k_empty[k.stage]);
    k.advance();
  } else {
    shared.q_full[q.stage][consumer].wait(q.phase);
    load_queries<Config>(shared, consumer, q.stage, acc);
  }
}

template <class Config>
__device__ __forceinline__ void consume(const PrefillParams& params,
                                        typename Config::SharedMemory& shared, int consumer) {
  Accumulators<Config> acc;
  ScoreUnits units = score_units<Config>(params, params.attention.scale);
  units.factor = opaque(units.factor);  // else loaded and multiplied again for every key tile: 3 %
  Ring<kTileSlots> tiles;
  Ring<Config::kKeyStages> k;  // of the next key tile whose scores are due
  Ring<Config::kStages> values;  // of the next whose values are
  Ring<Config::kQueryStages> q;
  if (consumer == Config::kConsumers - 1) pass_turn<Config>(consumer);

  const TileSlot* slot = take_tile<Config>(shared, tiles);
  if (slot->work.request < 0) return;
  take_queries<Config>(shared, consumer, q, k, acc);
  // Of later tiles the warp that stores out does so.
  if constexpr (Config::kPasses) {
    __syncwarp();
    release(shared.q_empty[q.stage][consumer]);
  }
  RowTile tile = begin_tile<Config>(params, shared, *slot, consumer, units);
  pass_keys<Config>(shared, tile, k);
  await_keys<Config>(shared.k_full[k.stage], k.phase);
  await_mask<Config>(shared, tile, consumer, last_block<Config>(tile), acc);
  products_begin();
  start_scores<Config>(shared, consumer, q.stage, k.stage, acc);
  products_commit();
  products_wait<0>();
  products_landed(acc.scores);
  release_stage<Config>(shared.k_empty[k.stage]);
  k.advance();
  weigh_scores<Config, true>(params, shared, tile, consumer, last_block<Config>(tile), acc);
  pass_values<Config>(shared, tile, values);

  while (true) {
    int block = last_block<Config>(tile);
    const bool single = block == tile.block_begin;
    if (!single) {
      block = next_block<Config>(params, tile, block);
      bool kept = step<Config, true>(params, shared, consumer, tile, block, q.stage, k, values, acc);
      // What is rare stands outside of the loop over key tiles: 0.8 % (H200, 2026-11-22).
      while (true) {
        if constexpr (Config::kInPlace) {
          if (!kept) end_outgrown<Config>(params, shared, consumer, tile, block, q.stage, k, values, acc);
        }
        kept = true;
        while (kept && block > tile.block_begin) {
          block = next_block<Config>(params, tile, block);
          kept = step<Config, false>(params, shared, consumer, tile, block, q.stage, k, values, acc);
        }
        if (kept) break;
      }
    }
    const Ring<Config::kStages> v = due_values<Config>(k, values);
    if (single) pack_weights<Config>(params, shared, acc);
    const bool closing = closes<Config>(tile);
    if (closing && (single || Config::kQueriesBehindLoop)) release_queries<Config>(shared, consumer, q.stage);
    if (closing) {
      q.advance();
      slot = take_tile<Config>(shared, tiles);
    }
    const bool more = uniform(slot->work.request >= 0);
    RowTile next = tile;
    if (more) {
      if (closing) {
        take_queries<Config>(shared, consumer, q, k, acc);
        if constexpr (!Config::kTight) next = begin_tile<Config>(params, shared, *slot, consumer, units);
        pass_keys<Config>(shared, next, k);
      } else {
        keep_segment<Config>(next, tile.block_begin - 1);
      }
      await_keys<Config>(shared.k_full[k.stage], k.phase);
      await_mask<Config>(shared, next, consumer, last_block<Config>(next), acc);
    }
    // Without a next tile these scores are of nothing, and nobody reads them.
    take_turn<Config>(consumer);
    products_begin();
    start_scores<Config>(shared, consumer, q.stage, k.stage, acc);
    products_commit();
    await_keys<Config>(shared.v_full[v.stage], v.phase);
    clear_first_keys<Config>(shared, v.stage, tile, consumer);
    if (single) clear_last_keys<Config>(shared, v.stage, tile, Config::kKeys, consumer);
    products_begin();
    start_values<Config, 0, Config::kKeys>(shared, v.stage, !single, acc);
    products_commit();
    pass_turn<Config>(consumer);
    const auto first_weights = [&](const RowTile& of) {
      products_landed(acc.scores);
      release_stage<Config>(shared.k_empty[k.stage]);
      k.advance();
      weigh_scores<Config, true>(params, shared, of, consumer, last_block<Config>(of), acc);
    };
    float mean[2];
    if constexpr (Config::kSegments) {
      add_segment_rows<Config>(params, shared, tile, consumer, acc);
      products_wait<1>();
      if (more) first_weights(next);
      finish_values<Config>(shared, v.stage, acc);
      if constexpr (Config::kOwnValueRing) values.advance();
      end_segment<Config>(params, shared, tile, consumer, acc);
      if (closing) {
        const int number = slot_number<Config>(shared, tile);
        __syncwarp();
        if (consumer == 0) release(shared.segments.stored[number]);
        release(shared.tile_empty[number]);
      }
      if (!more) break;
      tile = next;
      tile.block_begin = uniform(tile.block_begin);
      tile.last_block = uniform(tile.last_block);
      tile.row_begin = uniform(tile.row_begin);
      tile.ends = uniform(tile.ends);
    } else if constexpr (Config::kStoresApart) {
      finish_rows<Config>(params, tile.slot->work, consumer, acc, mean);
      products_wait<1>();
      if constexpr (Config::kTight) {
        if (more) release_stage<Config>(shared.k_empty[k.stage]);
        finish_values<Config>(shared, v.stage, acc);
        if (more) next = begin_tile<Config>(params, shared, *slot, consumer, units);
      }
      products_landed(acc.scores);
      if (more) {
        if constexpr (!Config::kTight) release_stage<Config>(shared.k_empty[k.stage]);
        k.advance();
        transform_scores<Config, false>(params, next, consumer, last_block<Config>(next), acc);
        mask_scores<Config>(params, shared, next, consumer, last_block<Config>(next), acc);
        release_mask<Config>(params, shared, next, consumer, last_block<Config>(next), acc);
        find_bases<Config>(next, acc);
      }
      if constexpr (!Config::kTight) finish_values<Config>(shared, v.stage, acc);
      if constexpr (Config::kOwnValueRing) values.advance();
      if constexpr (!Config::kPasses) {
        // Whether the row tiles so far are odd or even.
        shared.stores.empty[consumer].wait(Config::kQueryStages == 2 ? q.stage : q.phase);
      } else if (!more) {  // else the queries that are in registers now lay there
        shared.q_empty[q.stage][consumer].wait(q.phase ^ 1);
      }
      // Without a next tile these are powers of nothing.
      first_weights_of<Config>(next, acc, [&](int step) { stage_columns<Config>(shared, consumer, step, mean, acc); });
      fence_async_proxy();
      __syncwarp();
      release(shared.stores.full[consumer]);
      release(shared.tile_empty[slot_number<Config>(shared, tile)]);
      if (!more) break;
      pass_values<Config>(shared, next, values);
      tile = next;
    } else {
      finish_result<Config>(params, *tile.slot, consumer, acc, mean);
      products_wait<1>();
      if (more) first_weights(next);
      finish_values<Config>(shared, v.stage, acc);
      if constexpr (Config::kOwnValueRing) values.advance();
      if constexpr (Config::kParts) {
        store_part<Config>(params, *tile.slot, consumer, mean, acc);
      } else {
        store_rows<Config>(params, shared, tile.slot->work, consumer, mean, acc);
      }
      __syncwarp();
      release(shared.tile_empty[slot_number<Config>(shared, tile)]);
      if (!more) break;
      tile = next;
    }
  }
  if constexpr (!Config::kStoresApart) wait_stores_read();
}

template <int kDim, int kDimV, Type kQuery, Type kCache, Loader kLoad, Scores kScores, Sums kSums>
__device__ __forceinline__ void PrefillConfig<kDim, kDimV, kQuery, kCache, kLoad, kScores, kSums>::run(
    const PrefillParams& params) {
  using Config = PrefillConfig;
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQueryStages * kConsumers; ++i) {
      shared.q_full[0][i].init(1);
      shared.q_empty[0][i].init(4);
    }
    for (int i = 0; i < kKeyStages; ++i) {
      shared.k_full[i].init(kRows ? kLoaderThreads : 1);
      shared.k_empty[i].init(4 * kConsumers * kBlocks);
    }
    for (int i = 0; i < kStages; ++i) {
      shared.v_full[i].init(kRows ? kLoaderThreads : kNarrow ? kTransposers : 1);
      shared.v_empty[i].init(4 * kConsumers * kBlocks);
    }
    for (int i = 0; i < kPieces; ++i) {
      shared.raw_full[i].init(1);
      shared.raw_empty[i].init(kNarrow ? kTransposers : kLoaderWarps);
    }
    for (int i = 0; i < kTileSlots; ++i) {
      shared.tile_full[i].init(kConsumers);
      if constexpr (kPairs) {
        shared.pair.taken_full[i].init(1);
        shared.pair.taken_empty[i].init(1);
      }
      // Loaders of rows and transposers are done with a tile before consumers are.
      shared.tile_empty[i].init(
          4 * kConsumers + (kRows ? 0 : kNarrow ? 1 : kSegments || kStoresApart || kFindsApart ? 3 : 2));
      if constexpr (kSegments) shared.segments.stored[i].init(4);
    }
    if constexpr (kMasked) {
      for (int i = 0; i < kConsumers; ++i) {
        shared.masks.full[i].init(1);
        shared.masks.empty[i].init(4);
      }
    }
    if constexpr (kStoresApart) {
      for (int i = 0; i < kConsumers; ++i) {
        shared.stores.full[i].init(4);
        shared.stores.empty[i].init(1);
      }
    }
    if constexpr (kTokens) {
      for (int i = 0; i < kTokenSlots; ++i) {
        shared.tokens.full[i].init(1);
        shared.tokens.empty[i].init(kLoaderWarps);
      }
    }
    for (int i = 0; i < kPlaceSlots; ++i) {
      shared.places_full[i].init(kWiden ? 64 : 32);  // with copies of scales
      shared.places_empty[i].init(kLoaderWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();
  meet_pair<Config>();  // the barriers of both are there
  // What is settled is read ahead of the wait, by warps that wait afterwards.
  const bool beside = !kSegments && params.beside;
  if (!beside && !(kReadsAhead && params.list_settled)) wait_for_previous_kernel();
  allow_next_kernel();
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    const int warp = threadIdx.x / 32;
    if constexpr (!kRows) {
      if (warp == 0) copy_tiles<Config, true, kNarrow>(params, shared);
      if constexpr (kNarrow) {
        if (warp >= 2) transpose_values<Config>(params, shared);
      } else {
        if (warp == 2) copy_tiles<Config, false, true>(params, shared);
      }
      if constexpr (kTakerStores) {
        if (warp == 1) take_and_store_tiles<Config>(params, shared);
      } else {
        if (warp == 1) take_tiles<Config>(params, shared);
      }
      if constexpr (kSegments) {
        if (warp == 3) join_tiles<Config>(params, shared);
      }
      if constexpr (kFindsApart) {
        // Anew: roles that have no register to spare lie between.
        if (thread_anew() / 32 == 3) find_all_masks<Config>(params, shared);
      }
      if constexpr (kStoresApart && !kTakerStores) {
        if (warp == 3) store_tiles<Config>(params, shared);
      }
    } else if constexpr (kBoxes) {
      if (warp == 1) {
        load_raw<Config>(params, shared);
      } else {
        widen_boxes<Config>(params, shared);
      }
    } else if constexpr (kTokens) {
      if (warp == 1) {
        take_token_tiles<Config>(params, shared);
      } else {
        gather_tokens<Config>(params, shared);
      }
    } else if (warp == 1) {
      locate_rows<Config>(params, shared);
    } else if constexpr (kWiden) {
      widen_rows<Config>(params, shared);
    } else {
      gather_rows<Config>(params, shared);
    }
  } else {
    take_registers<kConsumerRegisters>();
    consume<Config>(params, shared, kUniform ? uniform(warpgroup - 1) : warpgroup - 1);
  }
  meet_pair<Config>();  // neither needs the other's shared memory
}

template <int kDim, int kDimV, Type kQuery, Type kCache, Loader kLoad, Scores kScores, Sums kSums>
using Config = Either<kSums == eight_rows || kSums == eight_shared,
                      EightRowsConfig<kDim, kQuery, kSums == eight_shared ? 2 : 1>,
                      PrefillConfig<kDim, kDimV, kQuery, kCache, kLoad, kScores, kSums>>;

}  // namespace fovea::kernels::cuda
