// SPDX-License-Identifier: Apache-2.0
// What the planner hands to the SIMD kernels: plain data, and one declaration per instruction set.
//
// A row is one (token, q head) pair; the rows of a kv head of a request are numbered
// token * group + head of the group. Keys are cut at fixed positions: tiles are the unit of the
// online softmax, chunks start from an empty state and are merged along a binary tree over the
// chunk number. Both depend on the key's position alone, and so do the bits of a row.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "kernels/attention.h"
#include "kernels/cpu/simd/attention_mask.h"

namespace fovea::kernels::cpu {

inline constexpr int32_t kTileKeys = 64;
inline constexpr int32_t kChunkKeys = 512;
// Rows of the largest micro-kernel of any instruction set.
inline constexpr int32_t kBlockRows = 12;
// Rows of the largest block of attention_wide.h, of any instruction set.
inline constexpr int32_t kWideBlockRows = 4 * kBlockRows;
// Rows of one head that an item takes at most.
inline constexpr int32_t kMaxRows = 48 * kBlockRows;
// Floats of the widest vector; rows of scratch are padded to it.
inline constexpr int32_t kPadFloats = 16;

// Rows [row_begin, row_end) of kv heads [head_begin, head_end) against keys [kv_begin, kv_end),
// which start at a chunk or at the first visible key.
struct AttentionItem {
  int64_t partial = -1;  // offset of the state to leave in the partials, floats; -1: write the rows
  int32_t partial_head = 0, partial_heads = 0;  // the kv heads of that state; the item's among them
  int32_t request = 0;
  int32_t head_begin = 0, head_end = 0;
  int32_t row_begin = 0, row_end = 0;
  int32_t kv_begin = 0, kv_end = 0;
};

// Pieces of one tile whose keys were split; piece p covers piece_keys keys from p * piece_keys.
struct AttentionMerge {
  AttentionItem tile;  // its partial: that of the first piece
  int64_t partial_stride = 0;
  int32_t first_piece = 0;
  int32_t pieces = 0;
};

// A partial result of rows: o [rows, dim_v] not yet divided by l, maximum m and sum l [rows].
struct RowStates {
  float* o;
  float* m;  // in units of log2
  float* l;
};

// Memory of one worker. Row counts are those of row_capacity(), dims are padded to kPadFloats.
struct AttentionScratch {
  float* q;           // [rows, dim], blocks of rows interleaved
  RowStates* states;  // [levels + 1]
  float* l_lanes;     // [rows, kPadFloats]
  float* k_tile;      // [kTileKeys, dim], transposed in panels, or in groups (KeyPanel)
  float* k_rows;      // [kTileKeys, dim + kPadFloats]
  void* k_unpacked;   // bf16 [kTileKeys, dim], of fp8 keys
  void* v_unpacked;   // bf16 [kTileKeys, dim_v], of fp8 values
  float* v_strips;    // [dim_v / 2 vectors, kTileKeys, 2 vectors], or in groups of columns
  float* scores;      // [rows that may be split, kTileKeys], or [kTileKeys, rows] of a wide block
  float* scales;      // [2, heads, kTileKeys], of keys, then of values
  RowBounds* bounds;  // [rows]
  int32_t levels;
};

// One pass over a layer.
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
