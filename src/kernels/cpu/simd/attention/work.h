// SPDX-License-Identifier: Apache-2.0
// The planner's input for the SIMD kernels: plain data, and one declaration per instruction set.
//
// A row is one (token, q head) pair. The rows of a kv head of a request are numbered token * group
// + head within the group. Keys are cut at fixed positions: a tile is the step of the online
// softmax; a chunk starts from an empty state, and chunks are merged along a binary tree over their
// numbers. Both depend on the position of a key alone, so the bits of a row do not depend on the
// items.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "kernels/attention.h"
#include "kernels/cpu/simd/attention/mask.h"

namespace fovea::kernels::cpu {

inline constexpr int32_t kTileKeys = 64;
inline constexpr int32_t kChunkKeys = 512;
// Rows of the largest row block of any instruction set.
inline constexpr int32_t kBlockRows = 12;
// Rows of the largest lane block (lane_blocks.h) of any instruction set.
inline constexpr int32_t kLaneBlockRows = 4 * kBlockRows;
// Maximum of the rows of one head in an item.
inline constexpr int32_t kMaxRows = 48 * kBlockRows;
// Floats of the widest vector; rows of scratch are padded to it.
inline constexpr int32_t kPadFloats = 16;

// Rows [row_begin, row_end) of kv heads [head_begin, head_end) against keys [kv_begin, kv_end),
// which start at a chunk or at the first visible key.
struct AttentionItem {
  int64_t partial = -1;  // offset of its partial result in floats; -1: the item writes the outputs
  int32_t partial_head = 0,
          partial_heads = 0;  // kv heads of that partial, a superset of the item's
  int32_t request = 0;
  int32_t head_begin = 0, head_end = 0;
  int32_t row_begin = 0, row_end = 0;
  int32_t kv_begin = 0, kv_end = 0;
};

// The pieces of a row tile whose keys were split. Piece p covers keys [p * n, (p + 1) * n) for a
// fixed n.
struct AttentionMerge {
  AttentionItem tile;  // with the partial of the first piece
  int64_t partial_stride = 0;
  int32_t first_piece = 0;
  int32_t pieces = 0;
};

// States of rows: o [rows, dim_v] before the division by l, maximum m and sum l [rows].
struct RowStates {
  float* o;
  float* m;  // in units of log2
  float* l;
};

// Scratch of one worker. Row counts are row_capacity(), dims are padded to kPadFloats.
struct AttentionScratch {
  float* q;           // [rows, dim], interleaved within blocks
  RowStates* states;  // [levels + 1]
  float* l_lanes;     // [rows, kPadFloats]
  float* k_tile;      // [kTileKeys, dim], transposed (KeyPanel)
  float* k_rows;      // [kTileKeys, dim + kPadFloats]
  void* k_unpacked;   // bf16 [kTileKeys, dim], converted from fp8
  void* v_unpacked;   // bf16 [kTileKeys, dim_v], converted from fp8
  float* v_strips;    // [dim_v / 2 vectors, kTileKeys, 2 vectors], or groups of columns
  float* scores;      // [split_row_capacity(), kTileKeys], or [kTileKeys, rows] of a lane block
  float* scales;      // [2, heads, kTileKeys]: keys, then values
  RowBounds* bounds;  // [rows]
  int32_t levels;
};

// The attention of one layer.
struct AttentionCall {
  const AttentionParams* params;
  float* partials;
};

using AttentionItemFunction = void (*)(const AttentionCall&, const AttentionItem&,
                                       const AttentionScratch&);
using AttentionMergeFunction = void (*)(const AttentionCall&, const AttentionMerge&);

namespace avx2 {
void attention_item(const AttentionCall& call, const AttentionItem& item,
                    const AttentionScratch& scratch);
void attention_merge(const AttentionCall& call, const AttentionMerge& merge);
}  // namespace avx2

namespace avx512 {
void attention_item(const AttentionCall& call, const AttentionItem& item,
                    const AttentionScratch& scratch);
void attention_merge(const AttentionCall& call, const AttentionMerge& merge);
}  // namespace avx512

}  // namespace fovea::kernels::cpu
