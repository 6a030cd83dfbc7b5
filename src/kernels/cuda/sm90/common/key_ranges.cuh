// SPDX-License-Identifier: Apache-2.0
// Masks that an interval per row cannot express, for all tokens of a row tile: which keys some of
// them see, which keys all of them see, and which key tiles between are hidden. Whole warps call
// these functions and read positions together.
#pragma once

#include "kernels/cuda/sm90/common/work_tile.cuh"

namespace fovea::kernels::cuda {

// Returns the part of a mask that intervals of keys express: window and chunk only if keys stand at
// their index.
__device__ inline MaskParams interval_mask(const MaskParams& mask) {
  MaskParams only = {};
  only.causal = mask.causal;
  only.first_keys = mask.first_keys;
  only.kept = mask.kept;
  only.tree = mask.tree;
  if (!mask.positions) {
    only.window = mask.window;
    only.chunk = mask.chunk;
  }
  return only;
}

__device__ __forceinline__ bool hides_by_position(const MaskParams& mask) {
  return mask.positions && (mask.window > 0 || mask.chunk > 0);
}

// Calls visit(Interval) for each span that tokens [first, last] are in; for masks without
// positions.
template <typename Visit>
__device__ __forceinline__ void for_each_span(const MaskParams& mask, const RequestView& view,
                                              int first, int last, Visit visit) {
  for (int32_t s = mask.span_indptr[view.request]; s < mask.span_indptr[view.request + 1]; ++s) {
    const Interval span = {mask.spans[2 * s], min(mask.spans[2 * s + 1], view.kv_len)};
    if (span.begin <= view.prefix() + last && span.end > view.prefix() + first) visit(span);
  }
}

constexpr int kNoEnd = 0x7fffffff;

// Returns the positions of the keys that the window and chunk of a token at this position reach.
__device__ inline Interval position_reach(const MaskParams& mask, int position) {
  Interval reach = {0, kNoEnd};
  if (mask.window > 0) reach.begin = max(0, position - mask.window + 1);
  if (mask.chunk > 0) {
    const int begin = position / mask.chunk * mask.chunk;
    reach = {max(reach.begin, begin), begin + mask.chunk};
  }
  return reach;
}

// The positions that all of tokens [first, last] reach, and those that any of them reaches.
struct Reaches {
  Interval all, any;
};
__device__ inline Reaches position_reaches(const MaskParams& mask, const RequestView& view,
                                           int first, int last) {
  int least = 0x7fffffff, most = 0;
  for (int token = first + static_cast<int>(threadIdx.x) % 32; token <= last; token += 32) {
    const int at = mask.positions[view.q_begin + token];
    least = min(least, at);
    most = max(most, at);
  }
  const Interval low = position_reach(mask, __reduce_min_sync(~0u, least));
  const Interval high = position_reach(mask, __reduce_max_sync(~0u, most));
  return {{high.begin, low.end}, {low.begin, high.end}};
}

// Returns a bit for each of the lane's new keys that stands within `reach`: key + lane + 32 * i, of
// kScanned keys before `end`.
constexpr int kScanned = 256;
__device__ __forceinline__ uint32_t standing_within(const MaskParams& mask, const RequestView& view,
                                                    int key, int end, const Interval& reach) {
  const int32_t* positions = mask.positions + view.q_begin - view.prefix();
  uint32_t within = 0;
#pragma unroll
  for (int i = 0; i < kScanned / 32; ++i) {
    const int mine = key + static_cast<int>(threadIdx.x) % 32 + 32 * i;
    const int at = mine < end ? positions[mine] : -1;
    within |= static_cast<uint32_t>(at >= reach.begin && at < reach.end) << i;
  }
  return within;
}

// Returns the first of new keys [key, end) that stands within `reach`, or `end`.
__device__ inline int first_within(const MaskParams& mask, const RequestView& view, int key,
                                   int end, const Interval& reach) {
#pragma unroll 1
  for (; key < end; key += kScanned) {
    const uint32_t within = standing_within(mask, view, key, end, reach);
#pragma unroll
    for (int i = 0; i < kScanned / 32; ++i) {
      const uint32_t votes = __ballot_sync(~0u, within >> i & 1);
      if (votes != 0) return key + 32 * i + __ffs(votes) - 1;
    }
  }
  return end;
}

// Returns the smallest key from which all new keys up to `end` stand within `reach`.
__device__ inline int all_within_from(const MaskParams& mask, const RequestView& view, int end,
                                      const Interval& reach) {
#pragma unroll 1
  for (int key = end; key > view.prefix();) {
    const int from = max(key - kScanned, view.prefix());
    const uint32_t within = standing_within(mask, view, from, key, reach);
#pragma unroll
    for (int i = kScanned / 32 - 1; i >= 0; --i) {
      const int first = from + 32 * i;
      const bool outside = first + static_cast<int>(threadIdx.x) % 32 < key && !(within >> i & 1);
      const uint32_t votes = __ballot_sync(~0u, outside);
      if (votes != 0) return first + 32 - __clz(votes);
    }
    key = from;
  }
  return view.prefix();
}

// Returns the end of the keys that some of tokens [first, last] may see.
__device__ inline int keys_end(const MaskParams& mask, const RequestView& view, int first,
                               int last) {
  if (mask.positions && mask.spans) return view.kv_len;
  int end = visible_keys(interval_mask(mask), view, first, last).end;
  if (mask.spans)
    for_each_span(mask, view, first, last, [&](const Interval& span) { end = max(end, span.end); });
  return end;
}

// Returns an interval outside which keys are hidden from all of tokens [first, last]. It may be
// smaller than that of visible_keys().
__device__ inline Interval tile_keys(const MaskParams& mask, const RequestView& view, int first,
                                     int last) {
  Interval keys = {visible_keys(interval_mask(mask), view, first, last).begin,
                   keys_end(mask, view, first, last)};
  if (mask.spans) {
    if (mask.positions) return keys;
    for_each_span(mask, view, first, last,
                  [&](const Interval& span) { keys.begin = min(keys.begin, span.begin); });
  } else if (hides_by_position(mask)) {
    const Interval any = position_reaches(mask, view, first, last).any;
    // Old keys stand at their index; new ones may stand anywhere.
    const int old = max(keys.begin, any.begin);
    keys.begin = old < min(view.prefix(), any.end)
                     ? old
                     : first_within(mask, view, max(keys.begin, view.prefix()), keys.end, any);
  }
  return keys;
}

// Returns keys that all of tokens [first, last] see, not necessarily all of these.
__device__ inline Interval open_keys(const MaskParams& mask, const RequestView& view, int first,
                                     int last) {
  if (mask.custom || (mask.positions && mask.item_prefix_lens)) return {};
  const MaskParams only = interval_mask(mask);
  // Both ends grow with the token.
  Interval keys = {visible_keys(only, view, last, last).begin,
                   visible_keys(only, view, first, first).end};
  if (mask.tree) keys.end = min(keys.end, view.prefix());
  if (hides_by_position(mask)) {
    const Interval all = position_reaches(mask, view, first, last).all;
    const Interval old = {max(keys.begin, all.begin), min(min(keys.end, view.prefix()), all.end)};
    int from = all_within_from(mask, view, keys.end, all);
    if (from == view.prefix() && all.end >= from) from = min(from, all.begin);
    keys.begin = max(keys.begin, from);
    if (old.end - old.begin > keys.end - keys.begin) keys = old;
  }
  if (mask.item_prefix_lens) {
    const int prefix = item_prefix(mask, view);
    if (view.prefix() + last >= prefix) keys.end = min(keys.end, prefix);
  }
  return keys;
}

// Returns the keys between a common prefix and the items of tokens [first, last], which no row
// sees; the tokens lie after the prefix.
__device__ inline Interval hidden_keys(const MaskParams& mask, const RequestView& view, int first,
                                       int last) {
  if (!mask.item_prefix_lens || mask.positions) return {};
  const int prefix = item_prefix(mask, view);
  if (view.prefix() + first < prefix) return {};
  const uint16_t* in_item = mask.token_pos_in_items + view.request * mask.token_pos_in_items_stride;
  int own = 0x7fffffff;
  for (int token = first + static_cast<int>(threadIdx.x) % 32; token <= last; token += 32) {
    const int at = view.prefix() + token;
    own = min(own, at - in_item[at - prefix]);
  }
  return {prefix, __reduce_min_sync(~0u, own)};
}

__device__ __forceinline__ bool is_open(const Interval& open, int start, int keys) {
  return start >= open.begin && start + keys <= open.end;
}

}  // namespace fovea::kernels::cuda
