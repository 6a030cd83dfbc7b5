// SPDX-License-Identifier: Apache-2.0
// The needs of layers, caches and batches, as values. fovea/attention_spec.h, kv_cache.h and
// batch.h describe every field. Include fovea/fovea.h.
#ifndef FOVEA_C_SPECS_H_
#define FOVEA_C_SPECS_H_

#include "fovea/c/base.h"

#ifdef __cplusplus
extern "C" {
#endif

// Kinds of attention.
enum {
  FOVEA_MHA = 0,
  FOVEA_MLA = 1,
  FOVEA_GATED_DELTA_NET = 2,
  FOVEA_MAMBA2 = 3,
  FOVEA_KDA = 4,
  FOVEA_LIGHTNING = 5,
  FOVEA_MAMBA1 = 6,
  FOVEA_SHORT_CONV = 7
};

// Keys that a query may see before windows, chunks and masks narrow them.
enum {
  FOVEA_DECODER = 0,        // causal over the request's own cache
  FOVEA_RAGGED = 1,         // causal among the new tokens; no cache
  FOVEA_ENCODER = 2,        // all new tokens of the request; no cache
  FOVEA_ENCODER_CACHE = 3,  // as encoder, and the keys are also written to a cache
  FOVEA_CROSS = 4           // every encoder token of the request, from a cache
};

// Masks whose content arrives with the batch.
enum {
  FOVEA_MASK_NONE = 0,
  FOVEA_MASK_TREE = 1,
  FOVEA_MASK_CUSTOM = 2,
  FOVEA_MASK_PREFIX_SPANS = 3,
  FOVEA_MASK_MULTI_ITEM = 4
};

typedef struct fovea_dual_chunk {
  int32_t chunk_size;  // 0: off
  int32_t local_size;
} fovea_dual_chunk;

typedef struct fovea_score_spec {
  float softmax_scale;  // 0: the default, 1 / sqrt(width of k)
  float logit_cap;      // 0: off
  int32_t has_sinks;
  int32_t has_alibi;
} fovea_score_spec;

typedef struct fovea_mla_spec {
  int32_t kv_lora_rank;  // width of the latent
  int32_t rope_dim;      // width of the rotary key; 0: none
  int32_t nope_dim;      // q and k values per head without position; 0: q arrives absorbed
  int32_t v_dim;         // values per head of out; 0 with absorbed q: out stays latent
} fovea_mla_spec;

typedef struct fovea_linear_spec {
  int32_t key_heads;
  int32_t value_heads;
  int32_t key_dim;
  int32_t value_dim;
  int32_t conv_width;  // 0: no convolution
} fovea_linear_spec;

// Needs of a group of layers. Kind mha sets the heads and head_dim, mla the heads and `mla`, linear
// kinds `linear` alone.
typedef struct fovea_attention_spec {
  uint32_t struct_size;
  int32_t kind;
  int32_t scope;
  int32_t mask;
  int32_t q_heads;
  int32_t kv_heads;  // divides q_heads; 1 for mla
  int32_t head_dim;
  int32_t head_dim_v;  // 0: head_dim
  fovea_dtype q_dtype;
  int32_t window;  // 0: off
  int32_t chunk;   // 0: off
  int32_t has_rope;
  int32_t needs_lse;
  int32_t batch_invariant;
  fovea_dual_chunk dual_chunk;
  fovea_score_spec scores;
  fovea_mla_spec mla;
  fovea_linear_spec linear;
} fovea_attention_spec;
FOVEA_C_API fovea_status fovea_attention_spec_init(fovea_attention_spec* spec, size_t struct_size);

enum { FOVEA_LAYOUT_MHA = 0, FOVEA_LAYOUT_MLA = 1, FOVEA_LAYOUT_MLA_FP8_ROWS = 2 };
enum {
  FOVEA_SCALE_NONE = 0,
  FOVEA_SCALE_PER_TENSOR = 1,
  FOVEA_SCALE_PER_HEAD = 2,
  FOVEA_SCALE_PER_TOKEN_HEAD = 3
};
// Order inside a page.
enum {
  FOVEA_NHD = 0,  // [page, token, head, dim]
  FOVEA_HND = 1   // [page, head, token, dim]
};

typedef struct fovea_kv_cache_spec {
  uint32_t struct_size;
  int32_t layout;
  int32_t order;
  fovea_dtype dtype;
  int32_t scale;
  int32_t layers;
  int32_t kv_heads;    // mla: 1
  int32_t head_dim;    // width of a K row; mla: kv_lora_rank + rope_dim
  int32_t head_dim_v;  // width of a V row; mla: kv_lora_rank; 0: head_dim (layout mha)
  int32_t page_size;   // tokens; default 1
  int32_t window;      // > 0: a sliding-window pool
} fovea_kv_cache_spec;
FOVEA_C_API fovea_status fovea_kv_cache_spec_init(fovea_kv_cache_spec* spec, size_t struct_size);
// Gives the bytes of a pool of `pages` pages; full_slots > 0: of a window pool.
FOVEA_C_API fovea_status fovea_kv_pool_bytes(const fovea_kv_cache_spec* spec, int64_t pages,
                                             int64_t full_slots, size_t* bytes);

// Recurrent states of linear layers, f32. short_conv: heads, rows and columns are 0.
typedef struct fovea_state_cache_spec {
  uint32_t struct_size;
  int32_t layers;
  int32_t conv_dim;
  int32_t conv_width;
  int32_t heads;         // linear.value_heads
  int32_t rows;          // linear.value_dim
  int32_t columns;       // linear.key_dim
  fovea_dtype dtype;     // type of the states: FOVEA_F32, FOVEA_BF16 or FOVEA_F16
  int32_t max_drafts;    // drafts that a slot keeps (fovea_linear_batch::draft_counts); 0: none
  int32_t draft_inputs;  // with max_drafts: what fovea_draft_inputs() says of the layers, else 0
} fovea_state_cache_spec;
FOVEA_C_API fovea_status fovea_state_cache_spec_init(fovea_state_cache_spec* spec,
                                                     size_t struct_size);
// Gives the values of a draft that a slot of linear layers keeps.
FOVEA_C_API fovea_status fovea_draft_inputs(const fovea_attention_spec* spec, int32_t* values);

// Upper bounds by which fovea_backend_reserve() sizes every buffer.
typedef struct fovea_batch_limits {
  uint32_t struct_size;
  int32_t max_requests;     // default 1
  int32_t max_tokens;       // new tokens of one batch; default 1
  int32_t max_q_len;        // new tokens of one request; default 1
  int32_t max_kv_len;       // tokens of one request; default 1
  int32_t max_encoder_len;  // 0 without cross attention
  int32_t prefix_levels;    // 0: shared prefixes are read as often as they occur
  int32_t reserved;         // 0
  int64_t min_prefix_savings;
  int64_t workspace_budget;
} fovea_batch_limits;
FOVEA_C_API fovea_status fovea_batch_limits_init(fovea_batch_limits* limits, size_t struct_size);

#ifdef __cplusplus
}
#endif

#endif  // FOVEA_C_SPECS_H_
