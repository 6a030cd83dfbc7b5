// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup: 64 query rows of each row tile of the block, over the key tiles from the
// last one to the first. The end of a row tile overlaps with the beginning of the next one: the
// first scores of the next row tile are multiplied along with the last values of this one.
#pragma once

#include "kernels/cuda/sm90/common/epilogue.cuh"
#include "kernels/cuda/sm90/common/key_tile_steps.cuh"

namespace fovea::kernels::cuda {

// Registers hold one row tile at a time: the next one begins when the last values have landed.
template <class Config>
constexpr bool kTight = Config::kConsumerRegisters < 160;

template <class Config>
struct Consumer : KeyTileSteps<Config> {
  using Steps = KeyTileSteps<Config>;
  using Steps::acc, Steps::consumer, Steps::k, Steps::values;
  using typename Steps::SharedMemory;

  ScoreUnits units;
  uint32_t n = 0;  // row tiles before the present one

  __device__ __forceinline__ Consumer(const PrefillParams& params, int number)
      : Steps(number), units(score_units<Config>(params, params.attention.scale)) {
    units.factor = opaque(units.factor);  // otherwise it is multiplied again for every key tile
  }

  __device__ __forceinline__ void run(const PrefillParams& params, SharedMemory& shared) {
    if (consumer == Config::kConsumers - 1) Steps::pass_turn();
    SharedSlot slot = take_tile(shared);
    if (slot->work.request < 0) return;
    take_queries(shared);
    // The warp that stores out releases the queries of later tiles.
    if constexpr (Config::kPasses) {
      __syncwarp();
      release(shared.q_empty[q().stage][consumer]);
    }
    RowTile tile = begin_tile(params, shared, slot);
    Steps::skip_passed_keys(shared, tile);
    if constexpr (Config::kOwnEnds) Steps::skip_unseen(shared, Steps::unseen_tiles(tile));
    begin_apart(params, shared, tile);
    Steps::skip_passed_values(shared, tile);
    while (true) {
      const int block = last_block<Config>(tile);
      const bool single = block == tile.block_begin;
      if (!single) add_key_tiles(params, shared, tile, block);
      const Ring<Config::kStages> v = Steps::due_values();
      if (single) pack_weights<Config>(params, shared, acc);
      const bool closing = closes<Config>(tile);
      if (closing && (single || kQueriesBehindLoop<Config>))
        Steps::release_queries(shared, q().stage);
      if (closing) {
        ++n;
        slot = take_tile(shared);
      }
      const bool more = uniform(slot->work.request >= 0);
      RowTile next = tile;
      // The next row tile begins when this one has ended, because the consumer skips key tiles.
      bool apart = false;
      if (more) {
        if (closing) {
          take_queries(shared);
          if constexpr (!kTight<Config>) next = begin_tile(params, shared, slot);
          Steps::skip_passed_keys(shared, next);
          if constexpr (Config::kOwnEnds) apart = uniform(Steps::unseen_tiles(next) > 0);
        } else {
          keep_segment<Config>(next, tile.block_begin - 1);
        }
        if (!apart) await_keys<Config>(shared.k_full[k.stage], k.phase);
        await_mask<Config>(shared, next, consumer, last_block<Config>(next), acc);
      }
      if constexpr (Config::kOwnEnds) {
        if (uniform(!more || apart)) {
          end_apart(params, shared, tile, single, more);
          if (!more) break;
          tile = uniform(next);
          Steps::skip_unseen(shared, Steps::unseen_tiles(tile) - 1);
          begin_apart(params, shared, tile);
          continue;
        }
      }
      if constexpr (Config::kExponents) {
        if (!single) add_weights<Config>(tile, acc);
      }
      // Without a next tile these scores are of nothing and are not read.
      Steps::take_turn();
      products_begin();
      start_scores<Config>(shared, consumer, q().stage, k.stage, acc);
      products_commit();
      start_last_values(shared, tile, v, single);
      if constexpr (Config::kSegments) {
        end_segments(params, shared, tile, next, v.stage, closing, more);
      } else if constexpr (Config::kStoresApart) {
        end_staged(params, shared, slot, tile, next, v.stage, more);
      } else {
        end_stored(params, shared, tile, next, v.stage, more);
      }
      if (!more) break;
      if constexpr (Config::kStoresApart) Steps::skip_passed_values(shared, next);
      tile = Config::kSegments || Config::kOwnEnds ? uniform(next) : next;
    }
    if constexpr (!Config::kStoresApart) wait_stores_read();
  }

 private:
  // Position in the ring of queries, which turns with the row tiles.
  __device__ __forceinline__ Ring<Config::kQueryStages> q() const {
    return Ring<Config::kQueryStages>::at(n);
  }

  // Waits for the slot of row tile n, which the consumer holds until it arrives at tile_empty.
  __device__ __forceinline__ SharedSlot take_tile(SharedMemory& shared) {
    const auto at = Ring<kTileSlots>::at(n);
    shared.tile_full[at.stage].wait(at.phase);
    return SharedSlot(shared.tiles[at.stage]);
  }
  __device__ __forceinline__ int slot_number(SharedMemory& shared, const RowTile& tile) const {
    return static_cast<int>(static_cast<const typename Config::Slot*>(tile.slot.get()) -
                            shared.tiles);
  }

  // Returns what the consumer keeps of a tile whose queries have arrived.
  __device__ __forceinline__ RowTile begin_tile(const PrefillParams& params, SharedMemory& shared,
                                                SharedSlot slot) {
    RowTile tile = row_tile<Config>(params, slot, consumer, units);
    if constexpr (Config::kSegments) keep_first_segment<Config>(tile);
    scale_rows<Config>(params, shared, consumer, tile);
    // Caps leave no registers for them.
    if constexpr (Config::kTransforms && !Config::kCaps) {
      find_slopes<Config>(params, consumer, tile);
    }
    return tile;
  }

  // Waits for the queries of row tile n and takes those that products read from registers.
  __device__ __forceinline__ void take_queries(SharedMemory& shared) {
    if constexpr (Config::kQueryRing) {
      shared.k_full[k.stage].wait(k.phase);
      load_queries<Config>(shared, consumer, k.stage, acc);
      release_stage<Config>(shared.k_empty[k.stage]);
      k.advance();
    } else {
      const auto at = q();
      shared.q_full[at.stage][consumer].wait(at.phase);
      load_queries<Config>(shared, consumer, at.stage, acc);
    }
  }

  // Computes the first scores and weights of a row tile, with no other products of the consumer.
  __device__ __forceinline__ void begin_apart(const PrefillParams& params, SharedMemory& shared,
                                              const RowTile& tile) {
    await_keys<Config>(shared.k_full[k.stage], k.phase);
    await_mask<Config>(shared, tile, consumer, last_block<Config>(tile), acc);
    products_begin();
    start_scores<Config>(shared, consumer, q().stage, k.stage, acc);
    products_commit();
    products_wait<0>();
    weigh_first(params, shared, tile);
  }
  __device__ __forceinline__ void weigh_first(const PrefillParams& params, SharedMemory& shared,
                                              const RowTile& tile) {
    products_landed(acc.scores);
    release_stage<Config>(shared.k_empty[k.stage]);
    k.advance();
    weigh_scores<Config, true>(params, shared, tile, consumer, last_block<Config>(tile), acc);
  }

  // Adds all key tiles but the first, `block`. What is rare stands outside of the inner loop.
  __device__ __forceinline__ void add_key_tiles(const PrefillParams& params, SharedMemory& shared,
                                                const RowTile& tile, int block) {
    block = next_block<Config>(params, tile, block);
    bool kept = Steps::template step<true>(params, shared, tile, block, q().stage);
    while (true) {
      if constexpr (Config::kInPlace) {
        if (!kept) Steps::end_outgrown(params, shared, tile, block, q().stage);
      }
      kept = true;
      while (kept && block > tile.block_begin) {
        block = next_block<Config>(params, tile, block);
        kept = Steps::template step<false>(params, shared, tile, block, q().stage);
      }
      if (kept) break;
    }
  }

  // Starts the last values of a row tile, those of its first key tile.
  __device__ __forceinline__ void start_last_values(SharedMemory& shared, const RowTile& tile,
                                                    const Ring<Config::kStages>& v, bool single) {
    await_keys<Config>(shared.v_full[v.stage], v.phase);
    clear_first_keys<Config>(shared, v.stage, tile, consumer);
    if (single) clear_last_keys<Config>(shared, v.stage, tile, Config::kKeys, consumer);
    products_begin();
    start_values<Config, 0, Config::kKeys>(shared, v.stage, !single, acc);
    products_commit();
    Steps::pass_turn();
  }

  // Ends a row tile whose next one, if there is any, begins apart. The first key tile that the
  // consumer skips is released before out is stored: other consumers wait for its stages.
  __device__ __forceinline__ void end_apart(const PrefillParams& params, SharedMemory& shared,
                                            const RowTile& tile, bool single, bool more) {
    Steps::take_turn();
    start_last_values(shared, tile, values, single);
    if (more) Steps::skip_keys(shared);
    float mean[2];
    finish_rows<Config>(params, tile.slot->work, consumer, acc, mean);
    Steps::finish_values(shared, values.stage);
    values.advance();
    if (more) Steps::skip_values(shared);
    store_rows<Config>(params, shared, tile.slot->work, consumer, mean, acc);
    __syncwarp();
    release(shared.tile_empty[slot_number(shared, tile)]);
  }

  __device__ __forceinline__ void finish_last_values(SharedMemory& shared, int v_stage) {
    Steps::finish_values(shared, v_stage);
    if constexpr (kOwnValueRing<Config>) values.advance();
  }

  // Ends a segment, and the row tile if it is its last one.
  __device__ __forceinline__ void end_segments(const PrefillParams& params, SharedMemory& shared,
                                               const RowTile& tile, const RowTile& next,
                                               int v_stage, bool closing, bool more) {
    add_segment_rows<Config>(params, shared, tile, consumer, acc);
    products_wait<1>();
    if (more) weigh_first(params, shared, next);
    finish_last_values(shared, v_stage);
    end_segment<Config>(params, shared, tile, consumer, acc);
    if (closing) {
      const int number = slot_number(shared, tile);
      __syncwarp();
      if (consumer == 0) release(shared.segments.stored[number]);
      release(shared.tile_empty[number]);
    }
  }

  // Ends a row tile whose rows a producer warp stores: they are staged under the powers of the next
  // row tile's first weights.
  __device__ __forceinline__ void end_staged(const PrefillParams& params, SharedMemory& shared,
                                             SharedSlot slot, const RowTile& tile, RowTile& next,
                                             int v_stage, bool more) {
    float mean[2];
    finish_rows<Config>(params, tile.slot->work, consumer, acc, mean);
    products_wait<1>();
    if constexpr (kTight<Config>) {
      if (more) release_stage<Config>(shared.k_empty[k.stage]);
      Steps::finish_values(shared, v_stage);
      if (more) next = begin_tile(params, shared, slot);
    }
    products_landed(acc.scores);
    if (more) {
      if constexpr (!kTight<Config>) release_stage<Config>(shared.k_empty[k.stage]);
      k.advance();
      const int block = last_block<Config>(next);
      transform_scores<Config, false>(params, next, consumer, block, acc);
      mask_scores<Config>(params, shared, next, consumer, block, acc);
      release_mask<Config>(params, shared, next, consumer, block, acc);
      find_bases<Config>(next, acc);
    }
    if constexpr (!kTight<Config>) Steps::finish_values(shared, v_stage);
    if constexpr (kOwnValueRing<Config>) values.advance();
    if constexpr (!Config::kPasses) {
      shared.stores.empty[consumer].wait(n % 2);
    } else if (!more) {  // otherwise rows go where the queries were that are in registers now
      shared.q_empty[q().stage][consumer].wait(q().phase ^ 1);
    }
    // Without a next tile these are powers of nothing.
    first_weights_of<Config>(
        next, acc, [&](int step) { stage_columns<Config>(shared, consumer, step, mean, acc); });
    fence_async_proxy();
    __syncwarp();
    release(shared.stores.full[consumer]);
    release(shared.tile_empty[slot_number(shared, tile)]);
  }

  // Ends a row tile, or a part of one, whose rows the consumer stores.
  __device__ __forceinline__ void end_stored(const PrefillParams& params, SharedMemory& shared,
                                             const RowTile& tile, const RowTile& next, int v_stage,
                                             bool more) {
    float mean[2];
    finish_result<Config>(params, *tile.slot, consumer, acc, mean);
    products_wait<1>();
    if (more) weigh_first(params, shared, next);
    finish_last_values(shared, v_stage);
    if constexpr (Config::kParts) {
      store_part<Config>(params, *tile.slot, consumer, mean, acc);
    } else {
      store_rows<Config>(params, shared, tile.slot->work, consumer, mean, acc);
    }
    __syncwarp();
    release(shared.tile_empty[slot_number(shared, tile)]);
  }
};

}  // namespace fovea::kernels::cuda
