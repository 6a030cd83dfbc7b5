// SPDX-License-Identifier: Apache-2.0
// A step of a consumer: scores of the next key tile, values of the present one, and what follows
// them.
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
// Registers hold one row tile at a time: the next one begins when the last values have arrived.
template <class Config>
constexpr bool kTight = Config::kConsumerRegisters < 160;

__device__ __forceinline__ void release(TransactionBarrier& empty) {
  if (elect_lane()) empty.arrive();
}

// Of keys or values.
template <class Config>
__device__ __forceinline__ void release_stage(TransactionBarrier& empty) {
  if constexpr (Config::kPairs) {
    const int lane = threadIdx.x % 32;
    if (lane < Config::kBlocks) arrive_in_cluster(empty, lane);
  } else {
    release(empty);
  }
}

// A place in a ring known to be the same in a warp's threads.
template <int kStages>
__device__ __forceinline__ Ring<kStages> uniform(const Ring<kStages>& at) {
  return {uniform(at.stage), static_cast<uint32_t>(uniform(static_cast<int>(at.phase)))};
}

// Whether a key tile passes the block by.
template <class Config>
__device__ __forceinline__ bool passes(const RowTile& tile) {
  return uniform(static_cast<const typename Config::Slot*>(tile.slot.get())->passed > 0);
}
// Gives a key tile's keys or values back unread.
template <class Config, int kStages>
__device__ __forceinline__ void pass_stage(TransactionBarrier (&full)[kStages],
                                           TransactionBarrier (&empty)[kStages],
                                           Ring<kStages>& at) {
  full[at.stage].wait(at.phase);
  __syncwarp();
  release_stage<Config>(empty[at.stage]);
  at.advance();
}
template <class Config>
__device__ __forceinline__ void pass_keys(typename Config::SharedMemory& shared,
                                          const RowTile& tile, Ring<Config::kKeyStages>& k) {
  if constexpr (Config::kPasses) {
    if (passes<Config>(tile)) pass_stage<Config>(shared.k_full, shared.k_empty, k);
    k = uniform(k);
  }
}
template <class Config>
__device__ __forceinline__ void pass_values(typename Config::SharedMemory& shared,
                                            const RowTile& tile, Ring<Config::kStages>& values) {
  if constexpr (Config::kPasses) {
    if (passes<Config>(tile)) pass_stage<Config>(shared.v_full, shared.v_empty, values);
    values = uniform(values);
  }
}

// The next row tile's last key tiles of which the consumer's rows see nothing.
template <class Config>
__device__ __forceinline__ int unseen_tiles(const RowTile& tile) {
  return uniform(tile.slot->work.block_end) - 1 - tile.last_block;
}
// Gives back so many of them; nothing of the row tile before is due.
template <class Config>
__device__ __forceinline__ void pass_unseen(typename Config::SharedMemory& shared, int count,
                                            Ring<Config::kKeyStages>& k,
                                            Ring<Config::kStages>& values) {
#pragma unroll 1
  for (; count > 0; --count) {
    pass_stage<Config>(shared.k_full, shared.k_empty, k);
    pass_stage<Config>(shared.v_full, shared.v_empty, values);
  }
  // Else the compiler does not see that they are, and neither are descriptors: 2.5 % (H200,
  // 2026-11-23).
  k = uniform(k);
  values = uniform(values);
}

// The products of the last step have landed in out.
template <class Config>
__device__ __forceinline__ void values_landed(typename Config::SharedMemory& shared, int stage,
                                              Accumulators<Config>& acc) {
  products_landed(acc.out);
  release_stage<Config>(shared.v_empty[stage]);
}
template <class Config>
__device__ __forceinline__ void finish_values(typename Config::SharedMemory& shared, int stage,
                                              Accumulators<Config>& acc) {
  products_wait<0>();
  values_landed<Config>(shared, stage, acc);
}

// Consumers issue their products in turns, so that the softmax of one runs under the products of
// another.
template <class Config>
__device__ __forceinline__ void take_turn(int consumer) {
  if constexpr (Config::kTurns) named_barrier_wait(1 + consumer, 2 * kWarpgroupThreads);
}
template <class Config>
__device__ __forceinline__ void pass_turn(int consumer) {
  if constexpr (Config::kTurns) {
    named_barrier_arrive(1 + (consumer + 1) % Config::kConsumers, 2 * kWarpgroupThreads);
  }
}

// The last scores of a row tile have landed.
template <class Config>
__device__ __forceinline__ void release_queries(typename Config::SharedMemory& shared, int consumer,
                                                int stage) {
  if constexpr (!Config::kQueryRegisters) release(shared.q_empty[stage][consumer]);
}

// The stage of the values that are due: values lag scores by one key tile.
template <class Config>
__device__ __forceinline__ Ring<Config::kStages> due_values(const Ring<Config::kKeyStages>& k,
                                                            const Ring<Config::kStages>& v) {
  if constexpr (kOwnValueRing<Config>) {
    return v;
  } else {
    return k.previous();
  }
}

// The products of a step have landed: values and maybe queries go back, keys too unless they are
// looked after before.
template <class Config>
__device__ __forceinline__ void end_products(const PrefillParams& params,
                                             typename Config::SharedMemory& shared, int consumer,
                                             const RowTile& tile, int block, int q_stage,
                                             Ring<Config::kKeyStages>& k,
                                             Ring<Config::kStages>& values,
                                             Accumulators<Config>& acc) {
  const Ring<Config::kStages> v = due_values<Config>(k, values);
  if constexpr (Config::kInPlace) {
    values_landed<Config>(shared, v.stage, acc);
  } else {
    if constexpr (!Config::kExponents) release_stage<Config>(shared.k_empty[k.stage]);
    if constexpr (!Config::kAlone) finish_values<Config>(shared, v.stage, acc);
    products_landed(acc.scores);
  }
  if (!kQueriesBehindLoop<Config> && block == tile.block_begin && closes<Config>(tile)) {
    release_queries<Config>(shared, consumer, q_stage);
  }
  k.advance();
  if constexpr (kOwnValueRing<Config>) values.advance();
}

// Scores of key tile `block`, values of the one after it, which was the row tile's first if kFirst.
// Its softmax runs under the products of the other warpgroups. false: end_outgrown is due.
template <class Config, bool kFirst>
__device__ __forceinline__ bool step(const PrefillParams& params,
                                     typename Config::SharedMemory& shared, int consumer,
                                     const RowTile& tile, int block, int q_stage,
                                     Ring<Config::kKeyStages>& k, Ring<Config::kStages>& values,
                                     Accumulators<Config>& acc) {
  const Ring<Config::kStages> v = due_values<Config>(k, values);
  if constexpr (kFirst) {
    pack_weights<Config>(params, shared, acc);
  } else if constexpr (Config::kExponents) {
    settle_weights<Config>(tile, acc);
  }
  await_keys<Config>(shared.k_full[k.stage], k.phase);
  await_mask<Config>(shared, tile, consumer, block, acc);
  take_turn<Config>(consumer);
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
  pass_turn<Config>(consumer);
  // Keys go back before the values have landed: 1 % in fp8, nothing elsewhere (H200, 2026-11-22).
  products_wait<Config::kNarrow || Config::kAlone || Config::kInPlace ? 1 : 0>();
  if constexpr (Config::kInPlace) {
    products_landed(acc.scores);
    const bool inner = transform_scores<Config, true>(params, tile, consumer, block, acc);
    mask_scores<Config>(params, shared, tile, consumer, block, acc);
    const bool kept = softmax_in_place<Config, kFirst>(params, tile, inner, acc);
    if (kept) {
      release_stage<Config>(shared.k_empty[k.stage]);
      release_mask<Config>(params, shared, tile, consumer, block, acc);
    }
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
  end_products<Config>(params, shared, consumer, tile, block, q_stage, k, values, acc);
  if constexpr (Config::kInPlace) {
    pack_weights<Config>(params, shared, acc);
  } else if constexpr (Config::kExponents) {
    weigh_exponents<Config>(acc);
  } else {
    weigh_scores<Config, false>(params, shared, tile, consumer, block, acc);
  }
  if constexpr (Config::kAlone) {
    finish_values<Config>(shared, v.stage, acc);
    take_next_weights<Config>(acc);
  }
  return true;
}

// What step has left to do where rows have outgrown their base.
template <class Config>
__device__ __forceinline__ void end_outgrown(const PrefillParams& params,
                                             typename Config::SharedMemory& shared, int consumer,
                                             const RowTile& tile, int block, int q_stage,
                                             Ring<Config::kKeyStages>& k,
                                             Ring<Config::kStages>& values,
                                             Accumulators<Config>& acc) {
  softmax_again<Config>(params, shared, tile, consumer, block, k.stage, acc);
  release_stage<Config>(shared.k_empty[k.stage]);
  release_mask<Config>(params, shared, tile, consumer, block, acc);
  end_products<Config>(params, shared, consumer, tile, block, q_stage, k, values, acc);
  pack_weights<Config>(params, shared, acc);
  shrink_out<Config>(acc.rescale, acc);
}

}  // namespace fovea::kernels::cuda
