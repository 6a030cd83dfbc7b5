// SPDX-License-Identifier: Apache-2.0
// Softmax attention over paged or packed keys: the one parameter block of every attention kernel.
#pragma once

#include <cstdint>

#include "fovea/kv_cache.h"
#include "fovea/tensor.h"

namespace fovea::kernels {

// Which keys a query sees. In a request of q_len new tokens and kv_len keys, token j is key
// n = kv_len - q_len + j: the last q_len keys are the new tokens themselves (causal false and
// unrelated keys, as in cross attention: leave everything below off).
//
// Order is counted in key numbers, everything else in positions. Token j stands at positions[row],
// or at its key number where positions is null; a new key stands where its token stands, a cached
// key n at n. Then key n is visible to token j when
//   same_span(n, j) or (in_order(n, j) and in_window and in_chunk and in_item and custom byte != 0)
// where a mask that is off holds and, whatever else is on, only for n >= first_keys[i];
//   in_order:  cached or no tree: n <= kv_len - q_len + j (causal), or always;
//              new key with a tree: its bit in tree[row]
//   in_window: position(n) > position(j) - window
//   in_chunk:  position(j) / chunk - position(n) / chunk in [nearest_chunk, farthest_chunk]
//   in_item:   position(j) < prefix, or position(n) < prefix, or
//              position(n) >= position(j) - token_pos_in_items[position(j) - prefix]
//   same_span: one [begin, end) holds both positions; it overrides all others
struct AttentionMask {
  bool causal = true;
  const int32_t* first_keys = nullptr;  // [requests], or null: 0; not together with spans
  int32_t window = 0;                   // 0: off
  int32_t chunk = 0;                    // 0: off
  // Counted back from the token's own.
  int32_t nearest_chunk = 0, farthest_chunk = 0;
  const int32_t* positions = nullptr;      // [tokens] or null
  const uint64_t* tree = nullptr;          // [tokens] bits over the request's new tokens, or null
  const uint8_t* custom = nullptr;         // [q_len, kv_len] per request, or null
  const int64_t* custom_indptr = nullptr;  // [requests + 1], where a request's bytes start
  const int32_t* spans = nullptr;          // pairs [begin, end) in positions, or null
  const int32_t* span_indptr = nullptr;    // [requests + 1]
  const uint32_t* item_prefix_lens = nullptr;    // [requests], or null
  const uint16_t* token_pos_in_items = nullptr;  // [requests, stride]
  int64_t token_pos_in_items_stride = 0;
};

// Where key n of request i is. Exactly one form is used.
//   pages:  page_table != null: page page_table[i * page_table_stride + n / page_size]
//   packed: row kv_indptr[i] + n of packed k and v (no cache)
struct KeySource {
  KvLayerView cache;  // pages
  const int32_t* page_table =
      nullptr;  // [requests, page_table_stride]; entries past the end unread
  int64_t page_table_stride = 0;
  HeadRows k, v;                       // packed
  const int32_t* kv_indptr = nullptr;  // [requests + 1]
};

// A score is s = scale * q.k, then cap * tanh(s / cap), then + slope * (position(n) - position(j));
// hidden keys take no part. A sink divides the result by 1 + e^(sink - lse) and leaves lse alone.
// Rows whose keys are all hidden give out = 0 and lse = -inf. Nothing outside a request's own keys
// is read into a result. mla caches: v is the front of k's row and has k's scale.
struct AttentionParams {
  HeadRows q;  // [tokens, q_heads, head_dim]
  // Scale of row (token, head) of an fp8 q: [token * q_scale_token_stride + head *
  // q_scale_head_stride], or null.
  const float* q_scale = nullptr;
  int64_t q_scale_token_stride = 0, q_scale_head_stride = 0;
  HeadRows q_rope;  // [tokens, q_heads, rope_dim] continuing q's rows, or absent
  KeySource keys;
  HeadRows out;          // [tokens, q_heads, head_dim_v]
  float* lse = nullptr;  // [tokens, q_heads] natural log without the sink, or null

  int32_t requests = 0;
  const int32_t* q_indptr = nullptr;  // [requests + 1]
  const int32_t* kv_lens = nullptr;   // [requests]

  int32_t q_heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;  // q and k; with q_rope: both parts together
  int32_t head_dim_v = 0;
  int32_t q_split_dim = 0;  // width of `q` when q_rope is given

  AttentionMask mask;
  float scale = 1;
  float logit_cap = 0;
  const float* sinks = nullptr;         // [q_heads] or null
  const float* alibi_slopes = nullptr;  // [q_heads] or null
};

}  // namespace fovea::kernels
