// SPDX-License-Identifier: Apache-2.0
// Softmax attention over paged or packed keys: the parameter block of the CPU kernels.
#pragma once

#include <cstdint>

#include "fovea/kv_cache.h"
#include "fovea/tensor.h"
#include "kernels/mask.h"

namespace fovea::kernels {

// The chunks that a token sees, counted back from its own: chunk distances in [nearest, farthest].
// Dual chunk attention attends to one distance at a time. With AttentionMask::chunk only.
struct ChunkReach {
  int32_t nearest = 0, farthest = 0;
};

// Where key n of request i is. Exactly one form is used.
//   pages:  page_table != null: page page_table[i * page_table_stride + n / page_size]
//   packed: row kv_indptr[i] + n of packed k and v (no cache)
struct KeySource {
  KvLayerView cache;                    // pages
  const int32_t* page_table = nullptr;  // [requests, page_table_stride]
  int64_t page_table_stride = 0;        // entries after a request's last page are not read
  HeadRows k, v;                        // packed
  const int32_t* kv_indptr = nullptr;   // [requests + 1]
};

// A score is s = scale * q.k, then cap * tanh(s / cap), then + slope * (position(n) - position(j));
// hidden keys take no part. A sink divides the result by 1 + e^(sink - lse) and leaves lse as it
// is. Rows whose keys are all hidden give out = 0 and lse = -inf. No memory outside a request's own
// keys reaches a result. mla caches: v is the front of k's row and has k's scale.
struct AttentionParams {
  HeadRows q;  // [tokens, q_heads, head_dim]
  QueryScale q_scale;
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

  AttentionMask mask = {.causal = 1};
  ChunkReach chunks;
  float scale = 1;
  float logit_cap = 0;
  const float* sinks = nullptr;         // [q_heads] or null
  const float* alibi_slopes = nullptr;  // [q_heads] or null
};

}  // namespace fovea::kernels
