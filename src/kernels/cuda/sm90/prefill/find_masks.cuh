// SPDX-License-Identifier: Apache-2.0
// Masks that no interval per row expresses: which keys a row tile can see, which of them all its rows see, and, for the
// key tiles between, bits that a producer warp finds ahead of the consumers.
#pragma once

#include "kernels/cuda/sm90/prefill/config.cuh"

namespace fovea::kernels::cuda {

// What of a mask intervals can express.
__device__ inline MaskParams interval_mask(const MaskParams& mask) {
  MaskParams only = {};
  only.causal = mask.causal;
  only.window = mask.window;
  only.chunk = mask.chunk;
  only.first_keys = mask.first_keys;
  only.tree = mask.tree;
  return only;
}

// Calls visit(Interval) for each span that tokens [first, last] are in; positions are not given.
template <typename Visit>
__device__ __forceinline__ void for_each_span(const MaskParams& mask, const RequestView& view, int first, int last,
                                              Visit visit) {
  for (int32_t s = mask.span_indptr[view.request]; s < mask.span_indptr[view.request + 1]; ++s) {
    const Interval span = {mask.spans[2 * s], min(mask.spans[2 * s + 1], view.kv_len)};
    if (span.begin <= view.prefix() + last && span.end > view.prefix() + first) visit(span);
  }
}

// Least and largest position of tokens [first, last].
__device__ inline Interval position_range(const MaskParams& mask, const RequestView& view, int first, int last) {
  Interval range = {0x7fffffff, 0};
#pragma unroll 1
  for (int token = first; token <= last; ++token) {
    const int at = mask.positions[view.q_begin + token];
    range = {min(range.begin, at), max(range.end, at)};
  }
  return range;
}

// First key of the window and chunk of a token at this position.
__device__ inline int first_in_reach(const MaskParams& mask, int position) {
  int first = 0;
  if (mask.window > 0) first = position - mask.window + 1;
  if (mask.chunk > 0) first = max(first, position / mask.chunk * mask.chunk);
  return max(first, 0);
}

// Keys outside are hidden from all of tokens [first, last]. As visible_keys, which looks less closely.
__device__ inline Interval tile_keys(const MaskParams& mask, const RequestView& view, int first, int last) {
  if (!needs_predicate(mask) || (mask.positions && mask.spans)) return visible_keys(mask, view, first, last);
  if (mask.positions) {
    // Old keys stand where they lie; new ones may stand anywhere.
    const int begin = mask.first_keys ? mask.first_keys[view.request] : 0;
    const int reach = first_in_reach(mask, position_range(mask, view, first, last).begin);
    const int end = mask.causal && !mask.tree ? view.prefix() + last + 1 : view.kv_len;
    return {max(begin, min(reach, view.prefix())), end};
  }
  Interval keys = visible_keys(interval_mask(mask), view, first, last);
  if (mask.spans) {
    for_each_span(mask, view, first, last, [&](const Interval& span) {
      keys = {min(keys.begin, span.begin), max(keys.end, span.end)};
    });
  }
  return keys;
}

// Keys that all of tokens [first, last] see: some of them.
__device__ inline Interval open_keys(const MaskParams& mask, const RequestView& view, int first, int last) {
  if (mask.custom || (mask.positions && mask.item_prefix_lens)) return {};
  MaskParams only = interval_mask(mask);
  if (mask.positions) only.window = only.chunk = 0;
  // Both ends grow with the token.
  Interval keys = {visible_keys(only, view, last, last).begin, visible_keys(only, view, first, first).end};
  if (mask.tree) keys.end = min(keys.end, view.prefix());
  if (mask.positions) {
    const Interval range = position_range(mask, view, first, last);
    keys.begin = max(keys.begin, first_in_reach(mask, range.end));
    keys.end = min(keys.end, view.prefix());
    if (mask.chunk > 0) keys.end = min(keys.end, (range.begin / mask.chunk + 1) * mask.chunk);
  }
  if (mask.item_prefix_lens) {
    const int prefix = static_cast<int>(mask.item_prefix_lens[view.request]);
    if (view.prefix() + last >= prefix) keys.end = min(keys.end, prefix);
  }
  return keys;
}

__device__ __forceinline__ bool is_open(const Interval& open, int start, int keys) {
  return start >= open.begin && start + keys <= open.end;
}

// Of 32 keys from `first` on, those in the interval.
__device__ __forceinline__ uint32_t keys_from(int first) {
  return first <= 0 ? ~0u : first >= 32 ? 0 : ~0u << first;
}
__device__ __forceinline__ uint32_t interval_bits(const Interval& keys, int first) {
  return keys_from(keys.begin - first) & ~keys_from(keys.end - first);
}

// Of 32 keys from `first` on, those that the token sees, unless a custom mask hides them.
__device__ inline uint32_t seen_bits(const MaskParams& mask, const RequestView& view, int token, int first) {
  if (mask.positions) {
    MaskParams only = mask;
    only.custom = nullptr;
    const uint32_t present = interval_bits(visible_keys(mask, view, token, token), first);
    uint32_t bits = 0;
#pragma unroll 1
    for (int bit = 0; bit < 32; ++bit) {
      const bool seen = present >> bit & 1 && inlined_visible(only, view, token, first + bit);
      bits |= static_cast<uint32_t>(seen) << bit;
    }
    return bits;
  }
  uint32_t bits = interval_bits(visible_keys(interval_mask(mask), view, token, token), first);
  if (mask.tree && first + 32 > view.prefix()) {
    const uint64_t tree = mask.tree[view.q_begin + token];
    const int fresh = first - view.prefix();
    const uint32_t older = ~keys_from(-fresh);
    const uint64_t drafts = fresh >= 64 ? 0 : fresh >= 0 ? tree >> fresh : tree << min(-fresh, 63);
    bits &= older | static_cast<uint32_t>(drafts);
  }
  const int at = view.prefix() + token;
  if (mask.item_prefix_lens) {
    const int prefix = static_cast<int>(mask.item_prefix_lens[view.request]);
    if (at >= prefix) {
      const int own = at - mask.token_pos_in_items[view.request * mask.token_pos_in_items_stride + at - prefix];
      bits &= ~keys_from(prefix - first) | keys_from(own - first);
    }
  }
  if (mask.spans) {
    for_each_span(mask, view, token, token, [&](const Interval& span) { bits |= interval_bits(span, first); });
  }
  return bits;
}

// Hides what a custom mask hides of the tokens of a consumer. A warp; a lane's keys are four neighbours.
template <class Config>
__device__ __forceinline__ void hide_custom(const MaskParams& mask, const RequestView& view, int first_token,
                                            int tokens, int first_key,
                                            uint32_t (&seen)[kGroupRows][(Config::kKeys + 31) / 32]) {
  const int lane = threadIdx.x % 32;
  const uint8_t* rows = mask.custom + mask.custom_indptr[view.request];
#pragma unroll 2
  for (int i = 0; i < tokens; ++i) {
    const int key = first_key + 4 * lane;
    const uint8_t* at = rows + static_cast<int64_t>(min(first_token + i, view.q_len - 1)) * view.kv_len + key;
    uint32_t shown = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (key + n < view.kv_len && at[n]) shown |= 1u << n;
    }
    const uint32_t word = __reduce_or_sync(0xffu << (lane & ~7), shown << lane % 8 * 4);
    if (lane % 8 == 0 && lane / 8 < (Config::kKeys + 31) / 32) seen[i][lane / 8] &= word;
  }
}

// Finds which keys of a key tile the tokens of each consumer see, where consumers ask for it. A warp. `phases`: a bit
// for each consumer.
template <class Config>
__device__ __forceinline__ void find_masks(const PrefillParams& params, typename Config::SharedMemory& shared,
                                           const TileSlot& slot, int block, uint32_t& phases) {
  const MaskParams& mask = params.attention.batch.mask;
  constexpr int kWords = (Config::kKeys + 31) / 32;
  const WorkTile& work = slot.work;
  const RequestView view = {work.request, work.q_begin, work.q_len, work.kv_len};
  const int tokens = kGroupRows >> params.heads_shift;
#pragma unroll
  for (int consumer = 0; consumer < Config::kConsumers; ++consumer) {
    const RowsView& rows = slot.rows[consumer];
    if (is_open({rows.open_begin, rows.open_end}, block * Config::kKeys, Config::kKeys)) continue;
    shared.masks.empty[consumer].wait(~phases >> consumer & 1);
    phases ^= 1u << consumer;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < tokens * kWords; i += 32) {
      const int token = min(work.first_token + consumer * tokens + i / kWords, work.q_len - 1);
      shared.masks.seen[consumer][i / kWords][i % kWords] =
          seen_bits(mask, view, token, block * Config::kKeys + i % kWords * 32);
    }
    __syncwarp();
    if (mask.custom) {
      hide_custom<Config>(mask, view, work.first_token + consumer * tokens, tokens, block * Config::kKeys,
                          shared.masks.seen[consumer]);
      __syncwarp();
    }
    if (threadIdx.x % 32 == 0) shared.masks.full[consumer].arrive();
  }
}

// The masks of all row tiles. A warp.
template <class Config>
__device__ void find_all_masks(const PrefillParams& params, typename Config::SharedMemory& shared) {
  Ring<kTileSlots> slots;
  uint32_t phases = 0;
  while (true) {
    shared.tile_full[slots.stage].wait(slots.phase);
    const TileSlot& slot = shared.tiles[slots.stage];
    if (slot.work.request < 0) return;
    for (int block = slot.work.block_end - 1; block >= slot.work.block_begin; --block) {
      find_masks<Config>(params, shared, slot, block, phases);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.tile_empty[slots.stage].arrive();
    slots.advance();
  }
}

}  // namespace fovea::kernels::cuda
