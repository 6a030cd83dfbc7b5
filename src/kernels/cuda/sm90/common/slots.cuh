// SPDX-License-Identifier: Apache-2.0
// Data that the roles of a prefill block hand each other in shared memory, besides operands.
#pragma once

#include "kernels/cuda/sm90/common/axes.cuh"
#include "kernels/cuda/sm90/common/segment_sums.cuh"

namespace fovea::kernels::cuda {

// Named barriers of a block. The numbers of a consumer add to the first two.
enum NamedBarrier : int {
  kFirstTurn = 1,      // turns of consumers to issue products
  kFirstConsumer = 8,  // the threads of a consumer
  kLoaders = 7,        // warps that load rows
};
// Waits for all threads of a consumer.
__device__ __forceinline__ void meet_consumer(int consumer) {
  named_barrier_wait(kFirstConsumer + consumer, kWarpgroupThreads);
}

// Key tiles within the work's that are hidden from all rows: no role visits them.
struct SkipSlot : TileSlot {
  Interval hidden;
};

// An item of portable/plan's list.
struct PartSlot : TileSlot {
  int32_t partial;       // slot of its result; -1: the item is a whole row tile
  int32_t request_keys;  // all keys of the request; the work's keys end with the part
};
// With `passing`: a key tile after the work's that only the other block of the pair needs.
struct PassSlot : TileSlot {
  int32_t passed;  // 0 or 1
};

// The keys that each token of the tile sees, where the warp that takes tiles finds them.
struct KeysSlot : TileSlot {
  alignas(sizeof(Interval)) Interval keys[kMaxConsumers * kGroupRows];
};

// The item that the first block of a pair takes for both.
struct PairMemory {
  int32_t taken[kTileSlots];
  TransactionBarrier taken_full[kTileSlots], taken_empty[kTileSlots];
};

// The sums of a row over the segments so far, and how the last one is added to those before.
struct SegmentRow {
  RowSums sums;
  Join join;
};

// Shared memory that only sums of segments need.
template <int kConsumers>
struct SegmentMemory {
  SegmentRow rows[kConsumers][kGroupRows];
  TransactionBarrier stored[kTileSlots];  // partial results have been stored
};
// Hand-over of rows to the warp that stores them: a consumer has staged all of its rows, and the
// warp has read them.
template <int kConsumers>
struct StoreMemory {
  TransactionBarrier full[kConsumers], empty[kConsumers];
};
// Which keys of a key tile a consumer's tokens see, as bits that a producer warp finds.
template <int kConsumers, int kWords>
struct MaskMemory {
  uint32_t seen[kConsumers][kGroupRows][kWords];
  TransactionBarrier full[kConsumers], empty[kConsumers];
};

// Warps that take tiles and copy boxes read the list and the page table before they wait for the
// previous kernel.
template <class Config>
constexpr bool kReadsAhead = !Config::kRows && !Config::kSegments;

// The warp that takes tiles finds the keys of each token. Otherwise consumers do so at the end of a
// row tile, when all of them wait.
template <class Config>
constexpr bool kFindsKeys = Config::kConsumers == 3 && !Config::kNarrow;

// Called by a warp that has read what was written before this pass, before it reads what the
// previous kernel may have written.
__device__ __forceinline__ void await_inputs(const PrefillParams& params) {
  if (!params.concurrent) wait_for_previous_kernel();
}

// Returns the request of a slot with all of its keys.
template <class Config>
__device__ __forceinline__ RequestView slot_view(const TileSlot& slot) {
  const WorkTile& work = slot.work;
  int32_t keys = work.kv_len;
  if constexpr (Config::kParts) keys = static_cast<const PartSlot&>(slot).request_keys;
  return {work.request, work.q_begin, work.q_len, keys};
}

// Returns the key tile below the hidden ones if `block` is the last of these, else `block`.
template <class Config>
__device__ __forceinline__ int pass_hidden(const TileSlot& slot, int block) {
  if constexpr (Config::kSkips) {
    const Interval hidden = static_cast<const SkipSlot&>(slot).hidden;
    if (block == hidden.end - 1) return hidden.begin - 1;
  }
  return block;
}

}  // namespace fovea::kernels::cuda
