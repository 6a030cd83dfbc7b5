// SPDX-License-Identifier: Apache-2.0
// What the roles of a Hopper prefill block hand each other in shared memory, operands apart.
#pragma once

#include "kernels/cuda/sm90/common/axes.cuh"
#include "kernels/cuda/sm90/common/segment_sums.cuh"

namespace fovea::kernels::cuda {

// Where key tiles inside of the work's may be hidden from all rows: those that nobody visits.
struct SkipSlot : TileSlot {
  Interval hidden;
};

// Of an item of a work list.
struct PartSlot : TileSlot {
  int32_t partial;       // slot of its result, -1: it is the whole row tile
  int32_t request_keys;  // the work's keys end with the part
};
// Where they pass: a key tile behind the work's that only the other block of the pair needs.
struct PassSlot : TileSlot {
  int32_t passed;  // 0 or 1
};

// Where the warp that takes tiles finds what each token of the tile sees.
struct KeysSlot : TileSlot {
  alignas(sizeof(Interval)) Interval keys[kMaxConsumers * kGroupRows];
};

// What the first block of a pair takes, for the second.
struct PairMemory {
  int32_t taken[kTileSlots];
  TransactionBarrier taken_full[kTileSlots], taken_empty[kTileSlots];
};

// A row of a row tile's segments so far, and how the last one is added to those before.
struct SegmentRow {
  RowSums sums;
  Join join;
};

// What only sums of segments need in shared memory.
template <int kConsumers>
struct SegmentMemory {
  SegmentRow rows[kConsumers][kGroupRows];
  TransactionBarrier stored[kTileSlots];  // partial results
};
// Of a row tile that a producer warp stores: all of a consumer's rows are staged, none is any
// longer.
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

// For a warp that has read ahead and is about to read what the kernel before may have written.
__device__ __forceinline__ void await_inputs(const PrefillParams& params) {
  if (!params.beside) wait_for_previous_kernel();
}

// The request of a slot, with all of its keys.
template <class Config>
__device__ __forceinline__ RequestView slot_view(const TileSlot& slot) {
  const WorkTile& work = slot.work;
  int32_t keys = work.kv_len;
  if constexpr (Config::kParts) keys = static_cast<const PartSlot&>(slot).request_keys;
  return {work.request, work.q_begin, work.q_len, keys};
}

// Of the hidden key tiles the last becomes the one below them all; others stay what they are.
template <class Config>
__device__ __forceinline__ int pass_hidden(const TileSlot& slot, int block) {
  if constexpr (Config::kSkips) {
    const Interval hidden = static_cast<const SkipSlot&>(slot).hidden;
    if (block == hidden.end - 1) return hidden.begin - 1;
  }
  return block;
}

}  // namespace fovea::kernels::cuda
