// SPDX-License-Identifier: Apache-2.0
// What the roles of a Hopper prefill block hand each other in shared memory, operands apart.
#pragma once

#include "kernels/cuda/common/hopper.cuh"
#include "kernels/cuda/common/prefill_params.h"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

constexpr int kGroupRows = 64;        // query rows of a consumer warpgroup: one wgmma tile
constexpr int kSwizzledColumns = 64;  // 16-bit columns of a 128-byte row
constexpr int kSwizzledBytes = 128;
constexpr int kTileSlots = 4;

constexpr int kMostConsumers = 3;

// A tile of work.
struct WorkTile {
  int32_t request;  // -1: no more work
  int32_t q_begin, q_len, kv_len;
  int32_t first_token;
  int32_t q_head;  // the first
  int32_t kv_head;
  int32_t first_key;               // row of the request's first key, for packed keys
  int32_t key_begin;               // what lies before must not reach a product
  int32_t block_begin, block_end;  // key tiles; at least one
};

// What one consumer's rows see of a tile's keys.
struct RowsView {
  // Keys that every row sees. Where key tiles begin behind open_begin, rows end open_end plus their
  // token's number, or with the request's keys.
  int32_t open_begin, open_end;
  // Of the last key tile that some row can see, rounded up to the grain. kOwnEnds: not above 0, if
  // none can see it, but some one of those before.
  int32_t columns;
};

// As the producer hands it to the consumers.
struct TileSlot {
  WorkTile work;
  RowsView rows[kMostConsumers];
};

// Where segments are summed: how a row tile is cut. Those of this block are the work's key tiles.
struct TileCut {
  int32_t first, count;  // segments of the row tile; count 0: it is not cut
  int32_t own;           // of this block
  int32_t partial_row;   // of the first one's partial result
};
struct CutSlot : TileSlot {
  TileCut cut;
};
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
  alignas(sizeof(Interval)) Interval keys[kMostConsumers * kGroupRows];
};

// What the first block of a pair takes, for the second.
struct PairMemory {
  int32_t taken[kTileSlots];
  TransactionBarrier taken_full[kTileSlots], taken_empty[kTileSlots];
};

// Factors of two sums whose rows are relative to different bases.
struct Join {
  float later, earlier;
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
struct Nothing {};

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
