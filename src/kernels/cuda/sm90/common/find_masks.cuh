// SPDX-License-Identifier: Apache-2.0
// Masks that an interval per row cannot express, as bits: a producer warp finds them before the
// consumers need them, for the key tiles that some rows see and others do not.
#pragma once

#include "kernels/cuda/sm90/common/custom_masks.cuh"
#include "kernels/cuda/sm90/common/slots.cuh"

namespace fovea::kernels::cuda {

// The distance of a key tile's keys from their index, if it is the same for all of them.
struct KeysMoved {
  bool alike;
  int by;
};
// A warp calls it.
template <int kKeys>
__device__ __forceinline__ KeysMoved keys_moved(const MaskParams& mask, const RequestView& view,
                                                int start) {
  if (!mask.positions) return {true, 0};
  const int last = view.kv_len - 1;
  const int by = key_position(mask, view, min(start, last)) - min(start, last);
  bool alike = true;
#pragma unroll
  for (int i = 0; i < kKeys; i += 32) {
    const int key = min(start + i + static_cast<int>(threadIdx.x) % 32, last);
    alike &= key_position(mask, view, key) - key == by;
  }
  return {__all_sync(~0u, alike) != 0, by};
}

// Returns a bit for each of 32 keys from `first` on: whether it stands at one of these positions.
__device__ inline uint32_t standing_bits(const MaskParams& mask, const RequestView& view,
                                         const KeysMoved& moved, const Interval& positions,
                                         int first) {
  if (moved.alike) {
    const int end = positions.end == kNoEnd ? kNoEnd : positions.end - moved.by;
    return interval_bits({positions.begin - moved.by, end}, first);
  }
  uint32_t bits = interval_bits({positions.begin, min(positions.end, view.prefix())}, first);
  const int fresh = first - view.prefix();
  if (fresh + 32 <= 0) return bits;
#pragma unroll 4
  for (int bit = 0; bit < 32; ++bit) {
    const int at = mask.positions[view.q_begin + max(0, min(fresh + bit, view.q_len - 1))];
    bits |= static_cast<uint32_t>(fresh + bit >= 0 && at >= positions.begin && at < positions.end)
            << bit;
  }
  return bits;
}

// Returns a bit for each of 32 keys from `first` on: whether the token sees it, custom masks aside.
__device__ inline uint32_t seen_bits(const MaskParams& mask, const RequestView& view,
                                     const KeysMoved& moved, int token, int first) {
  uint32_t bits = interval_bits(visible_keys(interval_mask(mask), view, token, token), first);
  const int at = query_position(mask, view, token);
  if (hides_by_position(mask)) {
    bits &= standing_bits(mask, view, moved, position_reach(mask, at), first);
  }
  if (mask.tree && first + 32 > view.prefix()) {
    const uint64_t tree = mask.tree[view.q_begin + token];
    const int fresh = first - view.prefix();
    const uint32_t older = ~keys_from(-fresh);
    const uint64_t drafts = fresh >= 64 ? 0 : fresh >= 0 ? tree >> fresh : tree << min(-fresh, 63);
    bits &= older | static_cast<uint32_t>(drafts);
  }
  if (mask.item_prefix_lens) {
    const int prefix = item_prefix(mask, view);
    if (at >= prefix) {
      const int own =
          at - mask.token_pos_in_items[view.request * mask.token_pos_in_items_stride + at - prefix];
      bits &= ~standing_bits(mask, view, moved, {prefix, own}, first);
    }
  }
  if (mask.spans) {
    for (int32_t s = mask.span_indptr[view.request]; s < mask.span_indptr[view.request + 1]; ++s) {
      const Interval span = {mask.spans[2 * s], mask.spans[2 * s + 1]};
      if (at < span.begin || at >= span.end) continue;
      bits |=
          standing_bits(mask, view, moved, span, first) & interval_bits({0, view.kv_len}, first);
    }
  }
  return bits;
}

// Returns a bit for each of 32 keys from `first` on: whether a custom mask shows it to the token.
// Reads eight bytes at a time, and only bytes of the request's mask.
__device__ inline uint32_t shown_bits(const MaskParams& mask, const RequestView& view, int token,
                                      int first) {
  const uint8_t* at = custom_row(mask, view, token) + first;
  const int within = static_cast<int>(reinterpret_cast<uint64_t>(at) % 8);
  const auto* from = reinterpret_cast<const uint2*>(at - within);
  const int count = within == 0 ? 4 : 5;
  uint32_t low = 0, high = 0;
  if (at - within < custom_row(mask, view, 0) ||
      reinterpret_cast<const uint8_t*>(from + count) > custom_row(mask, view, view.q_len)) {
#pragma unroll 1
    for (int n = 0; n < min(32, view.kv_len - first); ++n)
      low |= static_cast<uint32_t>(at[n] != 0) << n;
    return low;
  }
  uint2 bytes[5];
#pragma unroll
  for (int i = 0; i < 5; ++i) bytes[i] = i < count ? from[i] : uint2{};
    // A product brings the highest bits of four bytes next to each other: one for each byte that is
    // not 0.
#pragma unroll
  for (int i = 9; i >= 0; --i) {
    const uint32_t word = i % 2 == 0 ? bytes[i / 2].x : bytes[i / 2].y;
    const uint32_t shown = (((word & 0x7f7f7f7f) + 0x7f7f7f7f) | word) & 0x80808080;
    uint32_t& to = i < 8 ? low : high;
    to = __funnelshift_l(shown * 0x00204081, to, 4);
  }
  return __funnelshift_r(low, high, within);
}

// Finds which keys of a key tile the tokens of each consumer see, if the consumer waits for its
// mask. A warp calls it. `phases` has a bit for each consumer.
template <class Config>
__device__ __forceinline__ void find_masks(const PrefillParams& params,
                                           typename Config::SharedMemory& shared,
                                           const TileSlot& slot, int block, uint32_t& phases) {
  const MaskParams& mask = params.attention.batch.mask;
  constexpr int kWords = (Config::kKeys + 31) / 32;
  const WorkTile& work = slot.work;
  const RequestView view = slot_view<Config>(slot);
  const int tokens = kGroupRows >> params.heads_shift;
  const int lane = threadIdx.x % 32;
  // Threads that also bring keys have no registers for more.
  const KeysMoved moved = Config::kFindsApart
                              ? keys_moved<Config::kKeys>(mask, view, block * Config::kKeys)
                              : KeysMoved{!mask.positions, 0};
#pragma unroll 1
  for (int consumer = 0; consumer < Config::kConsumers; ++consumer) {
    const RowsView& rows = slot.rows[consumer];
    if (is_open({rows.open_begin, rows.open_end}, block * Config::kKeys, Config::kKeys)) continue;
    uint32_t* const words = &shared.masks.seen[consumer][0][0];
#pragma unroll 1
    for (int i = lane; i - lane < tokens * kWords; i += 32) {
      const int token = min(work.first_token + consumer * tokens + i / kWords, work.q_len - 1);
      const int first = block * Config::kKeys + i % kWords * 32;
      uint32_t bits = seen_bits(mask, view, moved, token, first);
      if (mask.custom) bits &= shown_bits(mask, view, token, first);
      if constexpr (Config::kParts) bits &= interval_bits({work.key_begin, work.kv_len}, first);
      // The first words are found while the consumer still reads those of the last key tile.
      if (i == lane) shared.masks.empty[consumer].wait(~phases >> consumer & 1);
      if (i < tokens * kWords) words[i] = bits;
    }
    phases ^= 1u << consumer;
    __syncwarp();
    if (lane == 0) shared.masks.full[consumer].arrive();
  }
}

// Calls visit(slot) for each row tile. A warp calls it.
template <class Config, typename Visit>
__device__ __forceinline__ void for_each_tile(typename Config::SharedMemory& shared, Visit visit) {
  for (uint32_t n = 0;; ++n) {
    shared.tile_full[n % kTileSlots].wait(n / kTileSlots % 2);
    const auto& slot = shared.tiles[n % kTileSlots];
    if (slot.work.request < 0) return;
    visit(slot);
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.tile_empty[n % kTileSlots].arrive();
  }
}

// Finds the masks of all row tiles. A warp runs it.
template <class Config>
__device__ void find_all_masks(const PrefillParams& params, typename Config::SharedMemory& shared) {
  const MaskParams& mask = params.attention.batch.mask;
  uint32_t phases = 0;
  await_inputs(params);
  // Other variants leave this warp too few registers for it.
  if (!Config::kTransforms && !Config::kParts && mask.custom && !hides_by_position(mask)) {
    for_each_tile<Config>(shared, [&](const TileSlot& slot) {
      find_custom_masks<Config>(params, shared, slot, phases);
    });
    return;
  }
  for_each_tile<Config>(shared, [&](const TileSlot& slot) {
    for (int block = slot.work.block_end - 1; block >= slot.work.block_begin;
         block = pass_hidden<Config>(slot, block - 1)) {
      find_masks<Config>(params, shared, slot, block, phases);
    }
  });
}

}  // namespace fovea::kernels::cuda
