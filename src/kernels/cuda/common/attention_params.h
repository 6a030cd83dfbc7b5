// SPDX-License-Identifier: Apache-2.0
// Parameter blocks of the attention kernels, read by host and device code alike.
#pragma once

#include "kernels/cuda/common/rotary.h"
#include "kernels/mask.h"

namespace fovea::kernels::cuda {

// Work is counted and split in units of 64 keys, whatever a kernel's tile is.
constexpr int32_t kBlockKeys = 64;

// Part of the keys of one row tile of one kv head. A tile's rows are its request's (token, q head
// of the group) pairs in that order.
struct WorkItem {
  int32_t request;
  int32_t kv_head;
  int32_t first_row;  // first of the request's packed rows
  // A multiple of kBlockKeys, or the first key that any row sees. Keys before the latter may have
  // left a window pool, so their slots must not reach a product.
  int32_t key_begin;
  int32_t key_end;  // exclusive
  int32_t partial;  // slot of the partial result, -1: the item is the whole tile
};

// The parts of one row tile that several CTAs computed, to be merged in this order: partial slot
// `first`, then `count - 1` slots from `first + 1` in steps of two. count 0: nothing to do.
struct MergeItem {
  int32_t request;
  int32_t kv_head;
  int32_t first_row;
  int32_t first;
  int32_t count;
};

// The work list that plan writes and attention reads, in device memory inside the workspace. It is
// cut into equally loaded contiguous ranges, one for each CTA. A range begins inside at most one
// tile and ends inside at most one tile, so two partial results a CTA are enough for every batch.
struct WorkList {
  WorkItem* items;       // [tiles * kv_heads + ctas]; entries between two ranges are unused
  int32_t* cta_begin;    // [ctas]
  int32_t* cta_end;      // [ctas]
  MergeItem* merges;     // [ctas]
  int32_t* tile_indptr;  // [requests + 1] tiles before each request
  float* partial_out;    // [2 * ctas, row_tile, head_dim_v]
  float* partial_lse;    // [2 * ctas, row_tile]
  int32_t ctas;
};

using MaskParams = AttentionMask;

struct BatchParams {
  const int32_t* q_indptr;  // [requests + 1]
  const int32_t* kv_lens;   // [requests], or null: as many keys as new tokens
  int32_t requests;
  int32_t q_heads;
  int32_t kv_heads;
  int32_t max_q_len;  // an upper bound for choices of the host; 0: that of the limits
  // A plan takes the requests with so many new tokens and leaves the others to the plan of a
  // concurrent kernel. max_planned_q_len 0: it takes all requests.
  int32_t min_planned_q_len, max_planned_q_len;
  int32_t min_kv_len;  // a plan omits requests with fewer keys; their rows are not written
  MaskParams mask;
};

// Element (slot, head) of K: k + (page * k_page_stride + place * k_token_stride + head *
// k_head_stride) elements. Packed keys: page_table is null, row kv_indptr[request] + n of k with
// k_token_stride.
struct KeyParams {
  const void* k;
  const void* v;
  int64_t k_page_stride, k_token_stride, k_head_stride;
  int64_t v_page_stride, v_token_stride, v_head_stride;
  const int32_t* page_table;  // [requests, page_table_stride]
  int64_t page_table_stride;
  int32_t page_size;
  const int32_t* kv_indptr;  // [requests + 1]
  // Scale of (slot, head): k_scale[slot * scale_slot_stride + head * scale_head_stride], or null.
  const float* k_scale;
  const float* v_scale;
  int32_t scale_slot_stride, scale_head_stride;
};

struct AttentionParams {
  BatchParams batch;
  KeyParams keys;
  const void* q;  // [tokens, q_heads, head_dim]
  int64_t q_token_stride, q_head_stride;
  // Scale of an fp8 q: q_scale[token * q_scale_token_stride + head * q_scale_head_stride], or null.
  const float* q_scale;
  int64_t q_scale_token_stride, q_scale_head_stride;
  void* out;  // [tokens, q_heads, head_dim_v]
  int64_t out_token_stride, out_head_stride;
  float* lse;  // [tokens, q_heads] or null
  int32_t lse_token_stride;
  int32_t f32_out;  // out is f32, without sinks; out and lse, which is not null, are dense: for
                    // prefix_join
  int32_t head_dim, head_dim_v;  // at most the variant's
  float scale;
  float logit_cap;
  const float* sinks;         // [q_heads] or null
  const float* alibi_slopes;  // [q_heads] or null
  WorkList work;
};

struct PlanParams {
  BatchParams batch;
  WorkList work;
  // No tile is cut, so that a row's sums are made in an order that its own keys decide.
  int32_t whole_tiles;
};

struct MergeParams {
  BatchParams batch;
  WorkList work;
  void* out;
  int64_t out_token_stride, out_head_stride;
  float* lse;
  int32_t lse_token_stride;
  const float* sinks;
  int32_t head_dim_v;
  int32_t f32_out;
};

constexpr int32_t kTableKeys = 256;  // the largest key tile of any kernel

// How a cache keeps scales; as KvScale.
enum ScaleKind : int32_t { kScaleNone, kScalePerTensor, kScalePerHead, kScalePerTokenHead };

constexpr int32_t kWriteWarps = 8;  // warps of a block that writes a cache; each writes a row

struct KvWriteParams {
  const void* k;  // [tokens, kv_heads, head_dim]; null: nothing is stored
  const void* v;  // [tokens, kv_heads, head_dim_v]
  int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
  const int64_t* slots;     // [tokens], what is outside [0, slot_count) is skipped
  const int64_t* slot_map;  // or null; what it drops is skipped
  int64_t slot_count;       // entries of slot_map, or slots of the pool
  const int32_t* q_indptr;  // tokens beyond q_indptr[requests] are padding
  int32_t requests;
  void* k_cache;
  void* v_cache;
  int64_t k_page_stride, k_place_stride, k_cache_head_stride;
  int64_t v_page_stride, v_place_stride, v_cache_head_stride;
  float* k_scale;
  float* v_scale;  // k_scale: a row of k and that of v share their scale
  ScaleKind scale_kind;
  int32_t page_size;
  int32_t kv_heads;
  int32_t head_dim, head_dim_v;
  // Applied to k before it is stored, and to q in place.
  RotaryParams rotary;
  const int32_t* positions;  // [tokens]; null without rotary
  void* q;                   // [tokens, q_heads, head_dim]
  int64_t q_token_stride, q_head_stride;
  int32_t q_heads;  // 0 without q or rotary
};

}  // namespace fovea::kernels::cuda
