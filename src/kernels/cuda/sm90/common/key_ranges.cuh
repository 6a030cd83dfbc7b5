// SPDX-License-Identifier: Apache-2.0
// Masks that no interval per row expresses, for all of a row tile's tokens: which keys some of them
// see, which all of them see, and which key tiles between are hidden. Called by whole warps, which
// read positions together.
#pragma once

#include "kernels/cuda/sm90/common/work_tile.cuh"

namespace fovea::kernels::cuda {

// What of a mask intervals of keys express: window and chunk only where keys stand at their index.
__device__ inline MaskParams interval_mask(const MaskParams& mask) {
  MaskParams only = {};
  only.causal = mask.causal;
  only.first_keys = mask.first_keys;
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

// Calls visit(Interval) for each span that tokens [first, last] are in; positions are not given.
template <typename Visit>
__device__ __forceinline__ void for_each_span(const MaskParams& mask, const RequestView& view,
                                              int first, int last, Visit visit) {
  for (int32_t s = mask.span_indptr[view.request]; s < mask.span_indptr[view.request + 1]; ++s) {
    const Interval span = {mask.spans[2 * s], min(mask.spans[2 * s + 1], view.kv_len)};
    if (span.begin <= view.prefix() + last && span.end > view.prefix() + first) visit(span);
  }
}

constexpr int kNoEnd = 0x7fffffff;

// Positions of the keys that the window and chunk of a token at this position reach.
__device__ inline Interval position_reach(const MaskParams& mask, int position) {
  Interval reach = {0, kNoEnd};
  if (mask.window > 0) reach.begin = max(0, position - mask.window + 1);
  if (mask.chunk > 0) {
    const int begin = position / mask.chunk * mask.chunk;
    reach = {max(reach.begin, begin), begin + mask.chunk};
  }
  return reach;
}

// The same of all of tokens [first, last], and of any of them.
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

// Of kScanned new keys from `key` on, those before `end`: a bit for each of the lane's, key + lane
// + 32 * i, that stands within `reach`.
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

// The first of new keys [key, end) that stands within `reach`, or `end`.
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

// The least key from which on all new keys up to `end` stand within `reach`.
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

// The end of the keys that some of tokens [first, last] may see.
__device__ inline int keys_end(const MaskParams& mask, const RequestView& view, int first,
                               int last) {
  if (mask.positions && mask.spans) return view.kv_len;
  int end = visible_keys(interval_mask(mask), view, first, last).end;
  if (mask.spans)
    for_each_span(mask, view, first, last, [&](const Interval& span) { end = max(end, span.end); });
  return end;
}

// Keys outside are hidden from all of tokens [first, last]. As visible_keys, which looks less
// closely.
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
    // Old keys stand where they lie; new ones may stand anywhere.
    const int old = max(keys.begin, any.begin);
    keys.begin = old < min(view.prefix(), any.end)
                     ? old
                     : first_within(mask, view, max(keys.begin, view.prefix()), keys.end, any);
  }
  return keys;
}

// Keys that all of tokens [first, last] see: some of them.
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

// Of tokens [first, last] behind a common prefix: the keys between that and their items, which
// nobody sees.
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
