// SPDX-License-Identifier: Apache-2.0
// AttentionMask as intervals of keys. The planner and the SIMD kernels include this header; all of
// it is static, so that each instruction set has a copy of its own.
#pragma once

#include "kernels/attention.h"

namespace fovea::kernels::cpu {

// The keys that one token may see lie in [prefix_begin, prefix_end) and [begin, end). The first
// interval is empty or left of the second. From predicate_begin on, key_visible() decides.
struct RowBounds {
  int32_t begin, end;
  int32_t prefix_begin, prefix_end;
  int32_t predicate_begin;
  int32_t position;
};

// One request's view of the mask.
struct MaskView {
  const AttentionMask* mask;
  ChunkReach chunks;
  int64_t first_row;  // a row of q
  int32_t request;
  int32_t q_len, kv_len;
  int32_t cached;  // kv_len - q_len; negative when there are more new tokens than keys
};

static inline MaskView mask_view(const AttentionParams& params, int32_t request) {
  MaskView view;
  view.mask = &params.mask;
  view.chunks = params.chunks;
  view.first_row = params.q_indptr[request];
  view.request = request;
  view.q_len = params.q_indptr[request + 1] - params.q_indptr[request];
  view.kv_len = params.kv_lens[request];
  view.cached = view.kv_len - view.q_len;
  return view;
}

static inline int32_t token_position(const MaskView& view, int32_t token) {
  return view.mask->positions ? view.mask->positions[view.first_row + token] : view.cached + token;
}

static inline int32_t key_position(const MaskView& view, int32_t key) {
  return key < view.cached ? key : token_position(view, key - view.cached);
}

static inline bool in_order(const MaskView& view, int32_t key, int32_t token) {
  if (view.mask->tree && key >= view.cached) {
    return (view.mask->tree[view.first_row + token] >> (key - view.cached)) & 1;
  }
  return !view.mask->causal || key <= view.cached + token;
}

static inline bool same_span(const MaskView& view, int32_t a, int32_t b) {
  const AttentionMask& mask = *view.mask;
  for (int32_t s = mask.span_indptr[view.request]; s < mask.span_indptr[view.request + 1]; ++s) {
    const int32_t begin = mask.spans[2 * s];
    const int32_t end = mask.spans[2 * s + 1];
    if (begin <= a && a < end && begin <= b && b < end) return true;
  }
  return false;
}

// Returns the length of the prefix that all items share, at most INT32_MAX: positions are below
// that.
static inline int32_t item_prefix(const MaskView& view) {
  const uint32_t prefix = view.mask->item_prefix_lens[view.request];
  return prefix < INT32_MAX ? static_cast<int32_t>(prefix) : INT32_MAX;
}

static inline int32_t tokens_of_item_before(const MaskView& view, int32_t position) {
  const AttentionMask& mask = *view.mask;
  return mask.token_pos_in_items[view.request * mask.token_pos_in_items_stride + position -
                                 item_prefix(view)];
}

static inline bool in_chunk(const MaskView& view, int32_t at, int32_t from) {
  const int32_t back = from / view.mask->chunk - at / view.mask->chunk;
  return back >= view.chunks.nearest && back <= view.chunks.farthest;
}

// Implements the definition in kernels/mask.h.
static inline bool key_visible(const MaskView& view, int32_t key, int32_t token) {
  const AttentionMask& mask = *view.mask;
  const int32_t from = token_position(view, token);
  const int32_t at = key_position(view, key);
  if (mask.spans && same_span(view, at, from)) return true;
  if (!in_order(view, key, token)) return false;
  if (mask.window > 0 && at <= from - mask.window) return false;
  if (mask.chunk > 0 && !in_chunk(view, at, from)) return false;
  if (mask.item_prefix_lens) {
    const int32_t prefix = item_prefix(view);
    if (from >= prefix && at >= prefix && at < from - tokens_of_item_before(view, from)) {
      return false;
    }
  }
  return !mask.custom || mask.custom[mask.custom_indptr[view.request] +
                                     static_cast<int64_t>(token) * view.kv_len + key] != 0;
}

static inline int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
static inline int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

// Returns the first position within the window and the chunks of a token at `from`.
static inline int32_t reach_begin(const MaskView& view, int32_t from) {
  const AttentionMask& mask = *view.mask;
  const int32_t begin = mask.window > 0 ? larger(0, from - mask.window + 1) : 0;
  if (mask.chunk == 0) return begin;
  return larger(begin, larger(0, from / mask.chunk - view.chunks.farthest) * mask.chunk);
}

// Narrows the row by the masks on positions, for keys whose position is their index.
static inline void narrow(const MaskView& view, int32_t from, RowBounds& row) {
  const AttentionMask& mask = *view.mask;
  row.begin = larger(row.begin, reach_begin(view, from));
  if (mask.chunk > 0) {
    const int32_t chunks = larger(0, from / mask.chunk - view.chunks.nearest + 1);
    const int64_t end = int64_t{chunks} * mask.chunk;
    if (end < row.end) row.end = static_cast<int32_t>(end);
  }
  if (mask.item_prefix_lens) {
    const int32_t prefix = item_prefix(view);
    const int32_t item_begin = from < prefix ? 0 : from - tokens_of_item_before(view, from);
    if (from >= prefix && item_begin > row.begin) {
      row.prefix_begin = row.begin;
      row.prefix_end = smaller(prefix, row.end);
      row.begin = larger(item_begin, row.prefix_end);
    }
  }
}

// Widens the row by the spans that contain the token. Spans override all other masks, and they
// contain the token, so the row remains an interval around it.
static inline void widen_by_spans(const MaskView& view, int32_t from, RowBounds& row) {
  const AttentionMask& mask = *view.mask;
  for (int32_t s = mask.span_indptr[view.request]; s < mask.span_indptr[view.request + 1]; ++s) {
    const int32_t begin = larger(0, mask.spans[2 * s]);
    const int32_t end = smaller(view.kv_len, mask.spans[2 * s + 1]);
    if (mask.spans[2 * s] > from || from >= mask.spans[2 * s + 1]) continue;
    row.begin = row.begin < row.end ? smaller(row.begin, begin) : begin;
    row.end = larger(row.end, end);
  }
}

// Returns whether intervals describe the mask: no row has a predicate_begin.
static inline bool only_intervals(const AttentionMask& mask) {
  const bool moved_keys = mask.tree || mask.positions;
  const bool by_position =
      mask.tree || mask.spans || mask.item_prefix_lens || mask.window > 0 || mask.chunk > 0;
  return !mask.custom && !(moved_keys && by_position);
}

static inline RowBounds row_bounds(const MaskView& view, int32_t token) {
  const AttentionMask& mask = *view.mask;
  const int32_t from = token_position(view, token);
  const bool moved_keys = mask.tree || mask.positions;
  RowBounds row;
  row.begin = mask.first_keys ? mask.first_keys[view.request] : 0;
  row.prefix_begin = row.prefix_end = 0;
  row.end = view.kv_len;
  row.predicate_begin = INT32_MAX;
  row.position = from;
  if (mask.custom || (moved_keys && (mask.spans || mask.item_prefix_lens))) {
    row.predicate_begin = 0;
    if (mask.spans) return row;
    if (mask.causal && !mask.tree) row.end = larger(0, smaller(row.end, view.cached + token + 1));
    // Keys before the window may be missing from a window pool, and their slots may hold NaN. New
    // keys may have moved positions.
    const int32_t cached = larger(0, view.cached);
    row.begin = larger(row.begin, smaller(reach_begin(view, from), moved_keys ? cached : row.end));
    return row;
  }
  if (mask.causal && !mask.tree) row.end = larger(0, smaller(row.end, view.cached + token + 1));
  if (moved_keys && (mask.tree || mask.window > 0 || mask.chunk > 0)) {
    // The position of a cached key is its index; key_visible() decides about the others.
    const int32_t cached = larger(0, view.cached);
    const int32_t end = row.end;
    row.end = smaller(row.end, cached);
    narrow(view, from, row);
    row.predicate_begin = larger(0, smaller(row.end, cached));
    row.begin = smaller(row.begin, cached);
    row.end = end;
    return row;
  }
  narrow(view, from, row);
  if (mask.spans) widen_by_spans(view, from, row);
  return row;
}

}  // namespace fovea::kernels::cpu
