// SPDX-License-Identifier: Apache-2.0
// The keys that a query row sees: an interval for common masks, a predicate for the others.
#pragma once

#include "kernels/cuda/common/attention_params.h"

namespace fovea::kernels::cuda {

// One request of a batch.
struct RequestView {
  int32_t request;
  int32_t q_begin;  // first row of q
  int32_t q_len;
  int32_t kv_len;
  __device__ int32_t prefix() const { return kv_len - q_len; }
};

__device__ inline RequestView request_view(const BatchParams& batch, int32_t request) {
  const int32_t begin = batch.q_indptr[request];
  const int32_t q_len = batch.q_indptr[request + 1] - begin;
  return {request, begin, q_len, batch.kv_lens ? batch.kv_lens[request] : q_len};
}

// Returns a request as a plan sees it: empty if another kernel serves it, or none.
__device__ inline RequestView planned_view(const BatchParams& batch, int32_t request) {
  const RequestView view = request_view(batch, request);
  const bool mine = batch.max_planned_q_len == 0 || (view.q_len >= batch.min_planned_q_len &&
                                                     view.q_len <= batch.max_planned_q_len);
  return mine && view.kv_len >= batch.min_kv_len ? view : RequestView{request, view.q_begin, 0, 0};
}

__device__ inline int32_t query_position(const MaskParams& mask, const RequestView& view,
                                         int32_t token) {
  return mask.positions ? mask.positions[view.q_begin + token] : view.prefix() + token;
}

// Returns a key's position. A new key has the position of its token, because drafts of a tree share
// positions.
__device__ inline int32_t key_position(const MaskParams& mask, const RequestView& view,
                                       int32_t key) {
  const int32_t fresh = key - view.prefix();
  return mask.positions && fresh >= 0 && fresh < view.q_len ? mask.positions[view.q_begin + fresh]
                                                            : key;
}

// Returns true for masks that an interval cannot express.
__device__ inline bool needs_predicate(const MaskParams& mask) {
  return mask.positions || mask.tree || mask.custom || mask.spans || mask.item_prefix_lens;
}

struct Interval {
  int32_t begin;
  int32_t end;
};

// Returns an interval that contains every key that a token in [first, last] sees. Without
// needs_predicate(), token t sees exactly visible_keys(t, t).
__device__ inline Interval visible_keys(const MaskParams& mask, const RequestView& view,
                                        int32_t first, int32_t last) {
  Interval keys = {mask.first_keys ? mask.first_keys[view.request] : 0, view.kv_len};
  if (mask.kept > 0) keys.begin = max(keys.begin, view.prefix() - mask.kept + 1);
  // Drafts and spans may see keys after their own token; the predicate decides about those.
  if (mask.positions || mask.custom || mask.spans || mask.item_prefix_lens) return keys;
  const int32_t low = view.prefix() + first;
  const int32_t high = view.prefix() + last;
  if (mask.causal && !mask.tree) keys.end = min(keys.end, high + 1);
  if (mask.window > 0) keys.begin = max(keys.begin, low - mask.window + 1);
  if (mask.chunk > 0) {
    keys.begin = max(keys.begin, low / mask.chunk * mask.chunk);
    keys.end = min(keys.end, (high / mask.chunk + 1) * mask.chunk);
  }
  keys.begin = max(keys.begin, 0);
  keys.end = max(keys.end, keys.begin);
  return keys;
}

// Returns the length of the prefix that all items share. Positions are below 2^31 - 1, so a longer
// prefix contains all of them.
__device__ __forceinline__ int32_t item_prefix(const MaskParams& mask, const RequestView& view) {
  return static_cast<int32_t>(min(mask.item_prefix_lens[view.request], 0x7fffffffu));
}

// Implements the definition of kernels::AttentionMask for 0 <= key < kv_len.
__device__ __forceinline__ bool inlined_visible(const MaskParams& mask, const RequestView& view,
                                                int32_t token, int32_t key) {
  const int32_t query_at = query_position(mask, view, token);
  const int32_t key_at = key_position(mask, view, key);
  if (mask.spans) {
    for (int32_t s = mask.span_indptr[view.request]; s < mask.span_indptr[view.request + 1]; ++s) {
      const int32_t begin = mask.spans[2 * s];
      const int32_t end = mask.spans[2 * s + 1];
      if (begin <= query_at && query_at < end && begin <= key_at && key_at < end) return true;
    }
  }
  if (mask.tree && key >= view.prefix()) {
    if (!(mask.tree[view.q_begin + token] >> (key - view.prefix()) & 1)) return false;
  } else if (mask.causal && key > view.prefix() + token) {
    return false;
  }
  if (mask.window > 0 && key_at <= query_at - mask.window) return false;
  if (mask.chunk > 0 && key_at / mask.chunk != query_at / mask.chunk) return false;
  if (mask.item_prefix_lens) {
    const int32_t prefix = item_prefix(mask, view);
    if (query_at >= prefix && key_at >= prefix) {
      const int64_t row = view.request * mask.token_pos_in_items_stride;
      if (key_at < query_at - mask.token_pos_in_items[row + query_at - prefix]) return false;
    }
  }
  return !mask.custom || mask.custom[mask.custom_indptr[view.request] +
                                     static_cast<int64_t>(token) * view.kv_len + key] != 0;
}

// Not inlined: 32 copies would dominate a kernel's code, and only tiles with rare masks call it.
__device__ __noinline__ inline bool visible(const MaskParams& mask, const RequestView& view,
                                            int32_t token, int32_t key) {
  return inlined_visible(mask, view, token, key);
}

}  // namespace fovea::kernels::cuda
