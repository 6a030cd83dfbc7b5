// SPDX-License-Identifier: Apache-2.0
// The masks of softmax attention, read by host and device code alike.
#pragma once

#ifdef __CUDACC_RTC__
#include "kernels/cuda/common/types.cuh"
#else
#include <cstdint>
#endif

namespace fovea::kernels {

// Which keys a query sees. In a request of q_len new tokens and kv_len keys, token j is key
// n = kv_len - q_len + j: the last q_len keys are the new tokens themselves. Keys that are not
// tokens of the request, as in cross attention, leave everything off.
//
// Order compares key numbers, everything else compares positions. Token j stands at positions[row],
// or at its key number where positions is null. A new key stands where its token stands, a cached
// key n stands at n. Then key n is visible to token j if
//   same_span(n, j) or (in_order(n, j) and in_window and in_chunk and in_item and custom byte != 0)
// where a mask that is off always holds, and if n >= first_keys[i] and n > kv_len - q_len - kept;
//   in_order:  cached or no tree: n <= kv_len - q_len + j (causal), or always;
//              new key with a tree: its bit in tree[row]
//   in_window: position(n) > position(j) - window
//   in_chunk:  position(j) / chunk == position(n) / chunk; ChunkReach shifts this
//   in_item:   position(j) < prefix, or position(n) < prefix, or
//              position(n) >= position(j) - token_pos_in_items[position(j) - prefix]
//   same_span: one [begin, end) holds both positions; it overrides all others
//
// The struct is part of the kernels' parameter blocks, so it has plain pointers and no default
// values; {} is a mask that hides nothing. The extents of the arrays were checked before.
struct AttentionMask {
  int32_t causal;                      // 1 or 0
  int32_t window;                      // 0: off
  int32_t chunk;                       // 0: off
  int32_t kept;                        // the window of a pool that has no older keys; 0: off
  const int32_t* first_keys;           // [requests], or null: 0; not together with spans
  const int32_t* positions;            // [tokens] or null
  const uint64_t* tree;                // [tokens] bits over the request's new tokens, or null
  const uint8_t* custom;               // [q_len, kv_len] per request, or null
  const int64_t* custom_indptr;        // [requests + 1], where a request's bytes start
  const int32_t* spans;                // pairs [begin, end) in positions, or null
  const int32_t* span_indptr;          // [requests + 1]
  const uint32_t* item_prefix_lens;    // [requests], or null
  const uint16_t* token_pos_in_items;  // [requests, token_pos_in_items_stride]
  int64_t token_pos_in_items_stride;
};

}  // namespace fovea::kernels
