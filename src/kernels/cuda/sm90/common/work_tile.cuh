// SPDX-License-Identifier: Apache-2.0
// Work of the Hopper prefill kernels, as the warp that takes it from the list hands it to the
// others of its block in shared memory.
#pragma once

#include "kernels/cuda/common/hopper.cuh"
#include "kernels/cuda/common/prefill_params.h"
#include "kernels/cuda/common/ring.cuh"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

constexpr int kGroupRows = 64;        // query rows of a warpgroup: one wgmma tile
constexpr int kSwizzledColumns = 64;  // 16-bit columns of a 128-byte row
constexpr int kSwizzledBytes = 128;
constexpr int kTileSlots = 4;  // row tiles that a block holds at a time

constexpr int kMaxConsumers = 3;

// MLA's heads: their keys may be packed, and the last columns of K one row for all heads.
template <int kDim, int kDimV>
constexpr bool kLatentHeads = kDim == 192 && kDimV == 128;

// A row tile, and the key tiles that the block computes for it.
struct WorkTile {
  int32_t request;  // -1: there is no more work
  int32_t q_begin, q_len, kv_len;
  int32_t first_token;
  int32_t q_head;  // first q head of the tile
  int32_t kv_head;
  int32_t first_key;               // row of the request's first key, for packed keys
  int32_t key_begin;               // keys before this one must not reach a product
  int32_t block_begin, block_end;  // key tiles, at least one
};

// The keys of a row tile that the rows of one consumer see.
struct RowsView {
  // Keys that every row sees. In key tiles that begin at or after open_begin, a row sees the keys
  // before open_end plus the number of its token within the consumer, and before the request's end.
  int32_t open_begin, open_end;
  // Columns of the last key tile that some row sees, rounded up to the grain. With
  // Config::kOwnEnds it is 0 or negative when no row sees any: some row then sees the key tile that
  // lies as many columns before.
  int32_t columns;
};

struct TileSlot {
  WorkTile work;
  RowsView rows[kMaxConsumers];
};

// How a row tile is cut where keys are summed in segments. The work's key tiles are those of the
// block's own segments.
struct TileCut {
  int32_t first, count;  // segments of the row tile; count 0: the tile is not cut
  int32_t own;           // segments of this block
  int32_t partial_row;   // row of the first segment's partial result
};
struct CutSlot : TileSlot {
  TileCut cut;
};

// Takes the place of a member that a variant does not have.
struct Nothing {};

}  // namespace fovea::kernels::cuda
