// SPDX-License-Identifier: Apache-2.0
// The steps of a consumer over the key tiles of a row tile: each computes the scores of the next
// key tile and adds the values of the present one.
#pragma once

#include "kernels/cuda/sm90/common/pair.cuh"
#include "kernels/cuda/sm90/common/products.cuh"
#include "kernels/cuda/sm90/common/segments.cuh"
#include "kernels/cuda/sm90/common/softmax_exponents.cuh"
#include "kernels/cuda/sm90/common/softmax_in_place.cuh"

namespace fovea::kernels::cuda {

// V has a ring position of its own, not that of the key tile before.
template <class Config>
constexpr bool kOwnValueRing = Config::kInPlace || Config::kPairs;
// Queries are released after the loop over key tiles.
template <class Config>
constexpr bool kQueriesBehindLoop = Config::kConsumers == 3;

// Arrives once for the warp, by elect.sync instead of the __syncwarp() of common/release.cuh.
__device__ __forceinline__ void release(TransactionBarrier& empty) {
  if (elect_lane()) empty.arrive();
}

// Releases a stage of keys or values, in both blocks of a pair.
template <class Config>
__device__ __forceinline__ void release_stage(TransactionBarrier& empty) {
  if constexpr (Config::kPairs) {
    const int lane = threadIdx.x % 32;
    if (lane < Config::kBlocks) arrive_in_cluster(empty, lane);
  } else {
    release(empty);
  }
}

// Returns the same position, which the compiler then knows to be equal in a warp's threads.
template <int kStages>
__device__ __forceinline__ Ring<kStages> uniform(const Ring<kStages>& at) {
  return {uniform(at.stage), static_cast<uint32_t>(uniform(static_cast<int>(at.phase)))};
}

// State that a consumer keeps from key tile to key tile, and its steps. Parameters and shared
// memory are arguments of the functions: the compiler would not know the address spaces of members.
template <class Config>
struct KeyTileSteps {
  using SharedMemory = typename Config::SharedMemory;
  using ValueRing = Ring<Config::kStages>;

  const int consumer;  // number in the block
  Accumulators<Config> acc;
  Ring<Config::kKeyStages> k;  // next key tile whose scores are due
  ValueRing values;            // next key tile whose values are due, with kOwnValueRing

  // Does not initialize the accumulators.
  __device__ __forceinline__ explicit KeyTileSteps(int number) : consumer(number) {}

  // Consumers take turns to issue products, so that the softmax of one runs under the products of
  // another.
  __device__ __forceinline__ void take_turn() {
    if constexpr (Config::kTurns) named_barrier_wait(kFirstTurn + consumer, 2 * kWarpgroupThreads);
  }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (Config::kTurns) {
      named_barrier_arrive(kFirstTurn + (consumer + 1) % Config::kConsumers, 2 * kWarpgroupThreads);
    }
  }

  // Releases a key tile's keys or values without reading them.
  template <int kStages>
  __device__ __forceinline__ void skip_stage(TransactionBarrier (&full)[kStages],
                                             TransactionBarrier (&empty)[kStages],
                                             Ring<kStages>& at) {
    full[at.stage].wait(at.phase);
    __syncwarp();
    release_stage<Config>(empty[at.stage]);
    at.advance();
  }
  __device__ __forceinline__ void skip_keys(SharedMemory& shared) {
    skip_stage(shared.k_full, shared.k_empty, k);
  }
  __device__ __forceinline__ void skip_values(SharedMemory& shared) {
    skip_stage(shared.v_full, shared.v_empty, values);
  }

  // Returns whether the row tile has a key tile that only the pair's other block needs.
  __device__ __forceinline__ static bool has_passed(const RowTile& tile) {
    return uniform(static_cast<const typename Config::Slot*>(tile.slot.get())->passed > 0);
  }
  __device__ __forceinline__ void skip_passed_keys(SharedMemory& shared, const RowTile& tile) {
    if constexpr (Config::kPasses) {
      if (has_passed(tile)) skip_keys(shared);
      k = uniform(k);
    }
  }
  __device__ __forceinline__ void skip_passed_values(SharedMemory& shared, const RowTile& tile) {
    if constexpr (Config::kPasses) {
      if (has_passed(tile)) skip_values(shared);
      values = uniform(values);
    }
  }

  // Returns how many of a row tile's last key tiles the consumer's rows see nothing of.
  __device__ __forceinline__ static int unseen_tiles(const RowTile& tile) {
    return uniform(tile.slot->work.block_end) - 1 - tile.last_block;
  }
  // Skips so many key tiles. Nothing of the previous row tile is due.
  __device__ __forceinline__ void skip_unseen(SharedMemory& shared, int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      skip_keys(shared);
      skip_values(shared);
    }
    // Otherwise the compiler would not keep descriptors in uniform registers.
    k = uniform(k);
    values = uniform(values);
  }

  // The products of the last step have landed in out.
  __device__ __forceinline__ void values_landed(SharedMemory& shared, int stage) {
    products_landed(acc.out);
    release_stage<Config>(shared.v_empty[stage]);
  }
  __device__ __forceinline__ void finish_values(SharedMemory& shared, int stage) {
    products_wait<0>();
    values_landed(shared, stage);
  }

  // Called when the last scores of a row tile have landed.
  __device__ __forceinline__ void release_queries(SharedMemory& shared, int q_stage) {
    if constexpr (!Config::kQueryRegisters) release(shared.q_empty[q_stage][consumer]);
  }

  // Returns the stage of the values that are due: values lag behind scores by one key tile.
  __device__ __forceinline__ ValueRing due_values() const {
    if constexpr (kOwnValueRing<Config>) {
      return values;
    } else {
      return k.previous();
    }
  }

  // Called when the products of a step have landed: releases values, queries if they are no longer
  // needed, and keys unless they have been.
  __device__ __forceinline__ void end_products(SharedMemory& shared, const RowTile& tile, int block,
                                               int q_stage) {
    const ValueRing v = due_values();
    if constexpr (Config::kInPlace) {
      values_landed(shared, v.stage);
    } else {
      if constexpr (!Config::kExponents) release_stage<Config>(shared.k_empty[k.stage]);
      if constexpr (!Config::kAlone) finish_values(shared, v.stage);
      products_landed(acc.scores);
    }
    if (!kQueriesBehindLoop<Config> && block == tile.block_begin && closes<Config>(tile)) {
      release_queries(shared, q_stage);
    }
    k.advance();
    if constexpr (kOwnValueRing<Config>) values.advance();
  }

  // Computes the scores of key tile `block` and adds the values of the one after it, which was the
  // row tile's first if kFirst. The softmax runs under the products of the other warpgroups.
  // Returns false if end_outgrown() is due.
  template <bool kFirst>
  __device__ __forceinline__ bool step(const PrefillParams& params, SharedMemory& shared,
                                       const RowTile& tile, int block, int q_stage) {
    const ValueRing v = due_values();
    if constexpr (kFirst) {
      pack_weights<Config>(params, shared, acc);
    } else if constexpr (Config::kExponents) {
      add_weights<Config>(tile, acc);
    }
    start_products<kFirst>(shared, tile, block, q_stage, v);
    // Keys may be released before the values have landed.
    products_wait<Config::kNarrow || Config::kAlone || Config::kInPlace ? 1 : 0>();
    if constexpr (Config::kInPlace) {
      const bool kept = weigh_in_place<kFirst>(params, shared, tile, block);
      products_wait<0>();  // for values, by the whole warpgroup: single warps may leave now
      if (!kept) return false;
    }
    if constexpr (Config::kExponents) {
      products_landed(acc.scores);
      release_stage<Config>(shared.k_empty[k.stage]);
      find_exponents<Config>(tile, acc);
      if (!is_plain<Config>(tile, block)) {
        mask_scores<Config>(params, shared, tile, consumer, block, acc);
        move_bases<Config>({true, true}, acc);
      }
    }
    end_products(shared, tile, block, q_stage);
    if constexpr (Config::kInPlace) {
      pack_weights<Config>(params, shared, acc);
    } else if constexpr (Config::kExponents) {
      weigh_exponents<Config>(acc);
    } else {
      weigh_scores<Config, false>(params, shared, tile, consumer, block, acc);
    }
    if constexpr (Config::kAlone) {
      finish_values(shared, v.stage);
      take_next_weights<Config>(acc);
    }
    return true;
  }

  // Does what step() left to do when rows have outgrown their base.
  __device__ __forceinline__ void end_outgrown(const PrefillParams& params, SharedMemory& shared,
                                               const RowTile& tile, int block, int q_stage) {
    softmax_again<Config>(params, shared, tile, consumer, block, k.stage, acc);
    release_stage<Config>(shared.k_empty[k.stage]);
    release_mask<Config>(params, shared, tile, consumer, block, acc);
    end_products(shared, tile, block, q_stage);
    pack_weights<Config>(params, shared, acc);
    shrink_out<Config>(acc.rescale, acc);
  }

 private:
  // Starts the products of a step, in this consumer's turn.
  template <bool kFirst>
  __device__ __forceinline__ void start_products(SharedMemory& shared, const RowTile& tile,
                                                 int block, int q_stage, const ValueRing& v) {
    await_keys<Config>(shared.k_full[k.stage], k.phase);
    await_mask<Config>(shared, tile, consumer, block, acc);
    take_turn();
    products_begin();
    start_scores<Config>(shared, consumer, q_stage, k.stage, acc);
    products_commit();
    await_keys<Config>(shared.v_full[v.stage], v.phase);
    if constexpr (kFirst) {
      const int columns = columns_of<Config>(tile, consumer);
      clear_last_keys<Config>(shared, v.stage, tile, columns, consumer);
      products_begin();
      start_first_values<Config>(shared, v.stage, columns, acc);
    } else {
      start_values<Config, 0, Config::kKeys>(shared, v.stage, true, acc);
    }
    products_commit();
    pass_turn();
  }

  // Turns landed scores into weights in their place; returns false if rows have outgrown their
  // base.
  template <bool kFirst>
  __device__ __forceinline__ bool weigh_in_place(const PrefillParams& params, SharedMemory& shared,
                                                 const RowTile& tile, int block) {
    products_landed(acc.scores);
    const bool inner = transform_scores<Config, true>(params, tile, consumer, block, acc);
    mask_scores<Config>(params, shared, tile, consumer, block, acc);
    const bool kept = softmax_in_place<Config, kFirst>(params, tile, inner, acc);
    if (kept) {
      release_stage<Config>(shared.k_empty[k.stage]);
      release_mask<Config>(params, shared, tile, consumer, block, acc);
    }
    return kept;
  }
};

}  // namespace fovea::kernels::cuda
