// SPDX-License-Identifier: Apache-2.0
// What the roles of a Hopper prefill block hand each other in shared memory, operands apart.
#pragma once

#include "kernels/cuda/common/conditional.cuh"
#include "kernels/cuda/sm90/common/segment_sums.cuh"
#include "kernels/cuda/sm90/common/work_tile.cuh"

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
// Of the key tiles whose rows are found: whether all keys are the request's.
template <int kPlaceSlots>
struct WholeTiles {
  bool at[kPlaceSlots];
};
// Which keys of a key tile a consumer's tokens see, as bits that a producer warp finds.
template <int kConsumers, int kWords>
struct MaskMemory {
  uint32_t seen[kConsumers][kGroupRows][kWords];
  TransactionBarrier full[kConsumers], empty[kConsumers];
};

// A key tile over pages of one token, for those who gather its rows.
struct TokenTile {
  const char* k;  // the row in page 0; null: there is no further key tile
  const char* v;
  Interval live;  // keys to be read, from the tile's first
};
constexpr int kTokenSlots = 8;
template <int kKeys>
struct TokenMemory {
  alignas(16) int32_t pages[kTokenSlots][kKeys];
  TokenTile tiles[kTokenSlots];
  TransactionBarrier full[kTokenSlots], empty[kTokenSlots];
};

}  // namespace fovea::kernels::cuda
