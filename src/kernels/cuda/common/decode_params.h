// SPDX-License-Identifier: Apache-2.0
// Parameter blocks of sm90/decode and its plan, read by host and device code alike.
#pragma once

#include "kernels/cuda/common/attention_params.h"
#include "kernels/cuda/common/tensor_map.h"

namespace fovea::kernels::cuda {

// Part of the keys of one row tile of one kv head. A tile's rows are its request's (token, q head
// of the group) pairs in that order.
struct alignas(16) DecodeItem {
  int32_t request;
  int32_t kv_head;
  int32_t first_row;  // first of the request's packed rows
  // The first key that any row sees, or a multiple of the plan's grain. Keys before the former may
  // have left a window pool, so their slots must not reach a product.
  int32_t key_begin;
  int32_t key_end;     // exclusive
  int32_t partial;     // slot of the partial result, -1: the item is the whole tile
  int32_t first_part;  // with a partial slot: the slot of the first part of the tile
  int32_t parts;       // parts of the tile
  int32_t q_begin;     // the request's first row of q
  int32_t q_len;
  int32_t kv_len;
  int32_t heads;  // kv heads from kv_head on, each with such a tile; partial rows lie head by head
};

// The range of the work list that one CTA computes.
struct alignas(16) DecodeRange {
  int32_t begin;  // items
  int32_t end;
  // Units of the longest part if CTAs of one cluster have all parts of the tile, otherwise 0.
  int32_t cluster_units;
  // 1 if those CTAs leave multiprocessors idle, which then copy for the next kernel; all stages of
  // the rings may be used.
  int32_t leaves_idle;
  DecodeItem first;  // copy of items[begin], so that a CTA starts after one read
};

// The work list that plan writes and attention reads, in device memory inside the workspace. It is
// cut into equally loaded contiguous ranges, one for each CTA. A range begins inside at most one
// tile and ends inside at most one tile, so two partial results a CTA are enough for every batch:
// CTA c keeps that of a tile begun before it in slot 2c, that of a tile it does not finish in slot
// 2c + 1.
struct DecodeWork {
  DecodeItem* items;    // [tiles * kv_heads + ctas]; entries between two ranges are unused
  DecodeRange* ranges;  // [ctas]
  float* partial_out;   // [2 * ctas, max_heads, row_tile, head_dim_v]
  float* partial_lse;   // [2 * ctas, max_heads, row_tile]
  int32_t* tickets;     // [2 * ctas] finished parts of the tile that begins in this slot
  int32_t ctas;
  int32_t max_heads;           // heads of an item; divides kv_heads
  int32_t min_units;           // no more CTAs take part than have so many units of work each
  int32_t cluster;             // CTAs of a cluster, divides ctas; 1: no clusters
  int32_t cluster_part_units;  // parts in clusters may be so long even if CTAs stay idle
};

// CTAs of a cluster at most. An H200 runs 15 clusters of 8 at once, but only 7 of 16.
constexpr int32_t kMaxCluster = 8;

// Returns the computing warps of a CTA: eight, or four if tiles of keys or rows are large, because
// rows lie in shared memory in pieces of 64 elements. An item's heads divide them.
constexpr int32_t decode_warps(int32_t head_dim, int32_t head_dim_v, int32_t rows) {
  return (head_dim + 63) / 64 + (head_dim_v + 63) / 64 <= 5 && rows <= 8 ? 8 : 4;
}

struct DecodePlanParams {
  BatchParams batch;
  DecodeWork list;
  // Next to a concurrent kernel (batch.max_planned_q_len > 0) the list gets so many CTAs that both
  // end together, but at least these, because fewer do not saturate the memory.
  int32_t min_ctas;
  // (query token, key) pairs that the other kernel finishes while this one finishes a unit, if each
  // has the whole device.
  float pairs_per_unit;
};

struct DecodeParams : AttentionParams {
  DecodeWork list;
  // The list and the page table are complete when the kernel starts, because an attention launched
  // before this one has waited for them.
  int32_t plan_complete;
  // The keys of a request's earlier tokens are complete too.
  int32_t keys_complete;
  // 1: keys are copied in boxes of 16 places by the maps, [page, place, kv head, dim]; 0: row by
  // row.
  int32_t boxes;
  TensorMap k_map, v_map;
};

}  // namespace fovea::kernels::cuda
