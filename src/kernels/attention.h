// SPDX-License-Identifier: Apache-2.0
// Softmax attention over paged or packed keys: the one parameter block of every attention kernel.
#pragma once

#include <cstdint>

#include "fovea/kv_cache.h"
#include "fovea/tensor.h"

namespace fovea::kernels {

// Which keys a query sees. Positions: query j of request i stands at `positions[row]`, or at
// kv_len - q_len + j; key n stands at n, and the new keys of a tree at their own positions.
struct AttentionMask {
  bool causal =
      true;  // key position <= query position (tree: decided by the bits among new tokens)
  int32_t window = 0;                  // key position > query position - window; 0: off
  int32_t chunk = 0;                   // key position / chunk == query position / chunk; 0: off
  const int32_t* positions = nullptr;  // [tokens] or null
  const uint64_t* tree = nullptr;      // [tokens] bits over the request's new tokens, or null
  const uint8_t* custom = nullptr;     // [q_len, kv_len] per request at custom_indptr, or null
  const int64_t* custom_indptr = nullptr;
  const int32_t* spans = nullptr;              // pairs [begin, end): mutually visible, or null
  const int32_t* span_indptr = nullptr;        // [requests + 1]
  const uint32_t* item_prefix_lens = nullptr;  // [requests], or null
  const uint16_t* token_pos_in_items = nullptr;
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

// Rows whose keys are all hidden give out = 0 and lse = -inf. Nothing outside a request's own keys
// is read into a result.
struct AttentionParams {
  HeadRows q;       // [tokens, q_heads, head_dim]
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
