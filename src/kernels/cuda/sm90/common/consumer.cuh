// SPDX-License-Identifier: Apache-2.0
// All row tiles of a consumer: between the loops over key tiles one ends and the next begins.
#pragma once

#include "kernels/cuda/sm90/common/epilogue.cuh"
#include "kernels/cuda/sm90/common/step.cuh"

namespace fovea::kernels::cuda {

// The slot of row tile `n` of the block, which the consumer holds until it arrives at tile_empty.
template <class Config>
__device__ __forceinline__ SharedSlot take_tile(typename Config::SharedMemory& shared, uint32_t n) {
  const auto at = Ring<kTileSlots>::at(n);
  shared.tile_full[at.stage].wait(at.phase);
  return SharedSlot(shared.tiles[at.stage]);
}

// Of the row tile.
template <class Config>
__device__ __forceinline__ int slot_number(const typename Config::SharedMemory& shared,
                                           const RowTile& tile) {
  return static_cast<int>(static_cast<const typename Config::Slot*>(tile.slot.get()) -
                          shared.tiles);
}

// What the consumer keeps of a tile whose queries are there.
template <class Config>
__device__ __forceinline__ RowTile begin_tile(const PrefillParams& params,
                                              const typename Config::SharedMemory& shared,
                                              SharedSlot slot, int consumer,
                                              const ScoreUnits& units) {
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
                                             const Ring<Config::kQueryStages>& q,
                                             Ring<Config::kKeyStages>& k,
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

// The first scores and weights of a row tile, beside no other products of the consumer.
template <class Config>
__device__ __forceinline__ void begin_apart(const PrefillParams& params,
                                            typename Config::SharedMemory& shared,
                                            const RowTile& tile, int consumer, int q_stage,
                                            Ring<Config::kKeyStages>& k,
                                            Accumulators<Config>& acc) {
  await_keys<Config>(shared.k_full[k.stage], k.phase);
  await_mask<Config>(shared, tile, consumer, last_block<Config>(tile), acc);
  products_begin();
  start_scores<Config>(shared, consumer, q_stage, k.stage, acc);
  products_commit();
  products_wait<0>();
  products_landed(acc.scores);
  release_stage<Config>(shared.k_empty[k.stage]);
  k.advance();
  weigh_scores<Config, true>(params, shared, tile, consumer, last_block<Config>(tile), acc);
}

// The last values of a row tile, those of its first key tile. single: of its only one.
template <class Config>
__device__ __forceinline__ void start_last_values(typename Config::SharedMemory& shared,
                                                  const RowTile& tile, int consumer,
                                                  const Ring<Config::kStages>& v, bool single,
                                                  Accumulators<Config>& acc) {
  await_keys<Config>(shared.v_full[v.stage], v.phase);
  clear_first_keys<Config>(shared, v.stage, tile, consumer);
  if (single) clear_last_keys<Config>(shared, v.stage, tile, Config::kKeys, consumer);
  products_begin();
  start_values<Config, 0, Config::kKeys>(shared, v.stage, !single, acc);
  products_commit();
  pass_turn<Config>(consumer);
}

// Ends a row tile whose next one, if there is any, begins apart. Of its key tiles that pass the
// consumer by the first goes back before out is stored: others wait for its stages.
template <class Config>
__device__ __forceinline__ void end_apart(const PrefillParams& params,
                                          typename Config::SharedMemory& shared,
                                          const RowTile& tile, int consumer, bool single, bool more,
                                          Ring<Config::kKeyStages>& k,
                                          Ring<Config::kStages>& values,
                                          Accumulators<Config>& acc) {
  take_turn<Config>(consumer);
  start_last_values<Config>(shared, tile, consumer, values, single, acc);
  if (more) pass_stage<Config>(shared.k_full, shared.k_empty, k);
  float mean[2];
  finish_rows<Config>(params, tile.slot->work, consumer, acc, mean);
  finish_values<Config>(shared, values.stage, acc);
  values.advance();
  if (more) pass_stage<Config>(shared.v_full, shared.v_empty, values);
  store_rows<Config>(params, shared, tile.slot->work, consumer, mean, acc);
  __syncwarp();
  release(shared.tile_empty[slot_number<Config>(shared, tile)]);
}

template <class Config>
__device__ __forceinline__ void consume(const PrefillParams& params,
                                        typename Config::SharedMemory& shared, int consumer) {
  Accumulators<Config> acc;
  ScoreUnits units = score_units<Config>(params, params.attention.scale);
  units.factor = opaque(units.factor);  // else loaded and multiplied again for every key tile: 3 %
  uint32_t n =
      0;  // row tiles before the present one: with it turn the rings of slots and of queries
  const auto q = [&] { return Ring<Config::kQueryStages>::at(n); };
  Ring<Config::kKeyStages> k;    // of the next key tile whose scores are due
  Ring<Config::kStages> values;  // of the next whose values are
  if (consumer == Config::kConsumers - 1) pass_turn<Config>(consumer);

  SharedSlot slot = take_tile<Config>(shared, n);
  if (slot->work.request < 0) return;
  take_queries<Config>(shared, consumer, q(), k, acc);
  // Of later tiles the warp that stores out does so.
  if constexpr (Config::kPasses) {
    __syncwarp();
    release(shared.q_empty[q().stage][consumer]);
  }
  RowTile tile = begin_tile<Config>(params, shared, slot, consumer, units);
  pass_keys<Config>(shared, tile, k);
  if constexpr (Config::kOwnEnds)
    pass_unseen<Config>(shared, unseen_tiles<Config>(tile), k, values);
  begin_apart<Config>(params, shared, tile, consumer, q().stage, k, acc);
  pass_values<Config>(shared, tile, values);

  while (true) {
    int block = last_block<Config>(tile);
    const bool single = block == tile.block_begin;
    if (!single) {
      block = next_block<Config>(params, tile, block);
      bool kept =
          step<Config, true>(params, shared, consumer, tile, block, q().stage, k, values, acc);
      // What is rare stands outside of the loop over key tiles: 0.8 % (H200, 2026-11-22).
      while (true) {
        if constexpr (Config::kInPlace) {
          if (!kept)
            end_outgrown<Config>(params, shared, consumer, tile, block, q().stage, k, values, acc);
        }
        kept = true;
        while (kept && block > tile.block_begin) {
          block = next_block<Config>(params, tile, block);
          kept =
              step<Config, false>(params, shared, consumer, tile, block, q().stage, k, values, acc);
        }
        if (kept) break;
      }
    }
    const Ring<Config::kStages> v = due_values<Config>(k, values);
    if (single) pack_weights<Config>(params, shared, acc);
    const bool closing = closes<Config>(tile);
    if (closing && (single || kQueriesBehindLoop<Config>))
      release_queries<Config>(shared, consumer, q().stage);
    if (closing) {
      ++n;
      slot = take_tile<Config>(shared, n);
    }
    const bool more = uniform(slot->work.request >= 0);
    RowTile next = tile;
    bool apart = false;  // the next row tile begins when this one has ended, as key tiles pass the
                         // consumer by
    if (more) {
      if (closing) {
        take_queries<Config>(shared, consumer, q(), k, acc);
        if constexpr (!kTight<Config>)
          next = begin_tile<Config>(params, shared, slot, consumer, units);
        pass_keys<Config>(shared, next, k);
        if constexpr (Config::kOwnEnds) apart = uniform(unseen_tiles<Config>(next) > 0);
      } else {
        keep_segment<Config>(next, tile.block_begin - 1);
      }
      if (!apart) await_keys<Config>(shared.k_full[k.stage], k.phase);
      await_mask<Config>(shared, next, consumer, last_block<Config>(next), acc);
    }
    if constexpr (Config::kOwnEnds) {
      if (uniform(!more || apart)) {
        end_apart<Config>(params, shared, tile, consumer, single, more, k, values, acc);
        if (!more) break;
        tile = uniform(next);
        pass_unseen<Config>(shared, unseen_tiles<Config>(tile) - 1, k, values);
        begin_apart<Config>(params, shared, tile, consumer, q().stage, k, acc);
        continue;
      }
    }
    if constexpr (Config::kExponents) {
      if (!single) settle_weights<Config>(tile, acc);
    }
    // Without a next tile these scores are of nothing, and nobody reads them.
    take_turn<Config>(consumer);
    products_begin();
    start_scores<Config>(shared, consumer, q().stage, k.stage, acc);
    products_commit();
    start_last_values<Config>(shared, tile, consumer, v, single, acc);
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
      if constexpr (kOwnValueRing<Config>) values.advance();
      end_segment<Config>(params, shared, tile, consumer, acc);
      if (closing) {
        const int number = slot_number<Config>(shared, tile);
        __syncwarp();
        if (consumer == 0) release(shared.segments.stored[number]);
        release(shared.tile_empty[number]);
      }
      if (!more) break;
      tile = uniform(next);
    } else if constexpr (Config::kStoresApart) {
      finish_rows<Config>(params, tile.slot->work, consumer, acc, mean);
      products_wait<1>();
      if constexpr (kTight<Config>) {
        if (more) release_stage<Config>(shared.k_empty[k.stage]);
        finish_values<Config>(shared, v.stage, acc);
        if (more) next = begin_tile<Config>(params, shared, slot, consumer, units);
      }
      products_landed(acc.scores);
      if (more) {
        if constexpr (!kTight<Config>) release_stage<Config>(shared.k_empty[k.stage]);
        k.advance();
        transform_scores<Config, false>(params, next, consumer, last_block<Config>(next), acc);
        mask_scores<Config>(params, shared, next, consumer, last_block<Config>(next), acc);
        release_mask<Config>(params, shared, next, consumer, last_block<Config>(next), acc);
        find_bases<Config>(next, acc);
      }
      if constexpr (!kTight<Config>) finish_values<Config>(shared, v.stage, acc);
      if constexpr (kOwnValueRing<Config>) values.advance();
      if constexpr (!Config::kPasses) {
        shared.stores.empty[consumer].wait(n % 2);
      } else if (!more) {  // else the queries that are in registers now lay there
        shared.q_empty[q().stage][consumer].wait(q().phase ^ 1);
      }
      // Without a next tile these are powers of nothing.
      first_weights_of<Config>(
          next, acc, [&](int step) { stage_columns<Config>(shared, consumer, step, mean, acc); });
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
      if constexpr (kOwnValueRing<Config>) values.advance();
      if constexpr (Config::kParts) {
        store_part<Config>(params, *tile.slot, consumer, mean, acc);
      } else {
        store_rows<Config>(params, shared, tile.slot->work, consumer, mean, acc);
      }
      __syncwarp();
      release(shared.tile_empty[slot_number<Config>(shared, tile)]);
      if (!more) break;
      tile = Config::kOwnEnds ? uniform(next) : next;
    }
  }
  if constexpr (!Config::kStoresApart) wait_stores_read();
}

}  // namespace fovea::kernels::cuda
