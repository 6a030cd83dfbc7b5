// SPDX-License-Identifier: Apache-2.0
// Backends: reserve, plan, forward; composition, merging, addresses inside captured passes.
// fovea/batch.h and attention_backend.h describe every field. Include fovea/fovea.h.
//
// On a GPU plan(), forward() and merge() only enqueue work on `stream` (a cudaStream_t; NULL: the
// default stream) and may be captured in a CUDA graph as they are: call them between
// cudaStreamBeginCapture() and cudaStreamEndCapture(). On the CPU `stream` is ignored.
#ifndef FOVEA_C_ATTENTION_H_
#define FOVEA_C_ATTENTION_H_

#include "fovea/c/select.h"
#include "fovea/c/storage.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  FOVEA_MODE_IDLE = 0,
  FOVEA_MODE_DECODE = 1,        // one new token per request
  FOVEA_MODE_EXTEND = 2,        // any number of new tokens per request
  FOVEA_MODE_MIXED = 3,         // extend and decode in one batch
  FOVEA_MODE_TARGET_VERIFY = 4  // the same number of draft tokens for every request
};

// Contents of masks; a backend reads those that its spec names.
typedef struct fovea_batch_masks {
  const DLTensor* tree_ancestors;     // u64 [tokens]
  const DLTensor* custom_visible;     // u8 or bool [custom_indptr[requests]]
  const DLTensor* custom_indptr;      // i64 [requests + 1]
  const DLTensor* spans_bounds;       // i32 [2 * spans_indptr[requests]]
  const DLTensor* spans_indptr;       // i32 [requests + 1]
  const DLTensor* items_prefix_lens;  // u32 [requests]
  const DLTensor* items_token_pos;    // u16 [requests, stride]
} fovea_batch_masks;

// Encoder tokens, for scope cross.
typedef struct fovea_cross_batch {
  const DLTensor* lens;   // i32 [requests]
  const DLTensor* table;  // as fovea_batch::table
  int32_t entry_tokens;   // as fovea_batch::entry_tokens
  int32_t reserved;       // 0
} fovea_cross_batch;

typedef struct fovea_linear_batch {
  const DLTensor* state_slots;     // i32 [requests]
  const DLTensor* snapshot_slots;  // i32 [tokens] or NULL
} fovea_linear_batch;

typedef struct fovea_batch_hints {
  int32_t max_q_len;   // 0: that of the limits
  int32_t max_kv_len;  // 0: that of the limits
  // i32 [requests] in host memory on every device; both or neither.
  const DLTensor* host_q_lens;
  const DLTensor* host_kv_lens;
  const DLTensor* shared_prefix;  // i32 [requests] or NULL
  int32_t prefix_written;         // 1 promises that earlier keys were stored before plan()
  int32_t reserved;               // 0
} fovea_batch_hints;

// One forward pass. Arrays are dense, in memory of the backend's device, and may be longer than
// stated; NULL: absent.
typedef struct fovea_batch {
  uint32_t struct_size;
  int32_t mode;
  int32_t requests;
  int32_t tokens;                // new tokens; on a GPU an upper bound
  const DLTensor* q_indptr;      // i32 [requests + 1]
  const DLTensor* kv_lens;       // i32 [requests]
  const DLTensor* request_rows;  // i32 [requests] row of each request in the tables
  const DLTensor* table;         // i32 [rows, entries]: the slots or pages of each request
  const DLTensor* out_slots;     // i64 [tokens] slot of each new token; -1: none
  const DLTensor* positions;     // i32 [tokens] or NULL
  int32_t entry_tokens;          // tokens per table entry: 1 (slots, the default) or the page size
  int32_t reserved;              // 0
  fovea_batch_masks masks;
  fovea_cross_batch cross;
  fovea_linear_batch linear;
  fovea_batch_hints hints;
  // i32 [requests] or NULL. Linear layers over a pool with max_drafts: how many of the last tokens
  // of each request are drafts, which its slot keeps (docs/speculation.md).
  const DLTensor* draft_counts;
} fovea_batch;
FOVEA_C_API fovea_status fovea_batch_init(fovea_batch* batch, size_t struct_size);

typedef struct fovea_rotary_tensors {
  const DLTensor* cos;        // f32 [max_positions, rotary_dim / 2]
  const DLTensor* sin;        // as cos
  const DLTensor* positions;  // i32 [tokens]
  int32_t interleaved;        // 1: pairs (2i, 2i + 1); 0: (i, i + rotary_dim / 2)
  int32_t reserved;           // 0
} fovea_rotary_tensors;

typedef struct fovea_mla_tensors {
  const DLTensor* latent;  // [tokens, 1, kv_lora_rank]
  const DLTensor* k_rope;  // [tokens, 1, rope_dim]
  const DLTensor* q_rope;  // [tokens, q_heads, rope_dim], or NULL: q holds it after its own part
  const DLTensor* w_uk;    // [q_heads, nope_dim, kv_lora_rank], with nope_dim > 0
  const DLTensor* w_uv;    // [q_heads, v_dim, kv_lora_rank], with nope_dim > 0
} fovea_mla_tensors;

typedef struct fovea_linear_tensors {
  const DLTensor* mixed;        // f32 [tokens, conv_dim]; in convolutions of mamba1 and short_conv
                                // [tokens, value_heads * value_dim]
  const DLTensor* conv_weight;  // f32 [conv_dim, conv_width]; mamba1: [value_heads, conv_width]
  const DLTensor* conv_bias;    // f32 [conv_dim] or NULL; mamba1: [value_heads] or NULL
  const DLTensor* log_decay;    // f32 [tokens, value_heads]; kda: [tokens, value_heads, key_dim];
                                // lightning: [value_heads]; mamba1: [value_heads, key_dim]
  const DLTensor* beta;         // f32 [tokens, value_heads]; lightning: NULL
  const DLTensor* skip;         // mamba1, mamba2: f32 [value_heads] or NULL
  int32_t l2_normalise_qk;      // gated_delta_net, kda
  int32_t plain_conv;           // short_conv: no SiLU after the convolution
} fovea_linear_tensors;

// The tensors of one layer, in memory of the backend's device. Rows have at least the batch's
// tokens; the last dimension is dense, token and head strides are free. On a GPU every address and
// stride is a multiple of 16 bytes.
typedef struct fovea_layer_tensors {
  uint32_t struct_size;
  int32_t layer;            // index inside the backend's pool
  const DLTensor* q;        // [tokens, q_heads, head_dim]; mla: as fovea/attention_backend.h says
  const DLTensor* k;        // [tokens, kv_heads, head_dim]
  const DLTensor* v;        // [tokens, kv_heads, head_dim_v]
  const DLTensor* out;      // [tokens, q_heads, head_dim_v]; linear kinds: f32 [tokens,
                            // value_heads, value_dim]
  const DLTensor* lse;      // f32 [tokens, q_heads] dense, natural logarithm
  const DLTensor* q_scale;  // f32 [tokens or 1, q_heads or 1], with an fp8 q
  int32_t save_kv;          // default 1: store k and v before attending
  int32_t reserved;         // 0
  const DLTensor* sinks;    // f32 [q_heads], with has_sinks
  const DLTensor* alibi_slopes;  // f32 [q_heads], with has_alibi
  const DLTensor* dual_q_succ;   // as q, with dual_chunk and without has_rope
  const DLTensor* dual_q_inter;  // as dual_q_succ
  fovea_rotary_tensors rotary;   // with has_rope
  fovea_mla_tensors mla;         // kind mla
  fovea_linear_tensors linear;   // linear kinds
} fovea_layer_tensors;
FOVEA_C_API fovea_status fovea_layer_tensors_init(fovea_layer_tensors* layer, size_t struct_size);

typedef struct fovea_backend fovea_backend;
// Creates the selection's backend. Softmax kinds with a cache need `kv`, linear kinds `states`, the
// CPU needs `threads`; others are NULL.
FOVEA_C_API fovea_status fovea_backend_create(const fovea_selection* selection, fovea_kv_pool* kv,
                                              fovea_state_pool* states, fovea_thread_pool* threads,
                                              fovea_backend** backend);
FOVEA_C_API fovea_status fovea_backend_destroy(fovea_backend* backend);
FOVEA_C_API fovea_status fovea_backend_name(const fovea_backend* backend, char* text,
                                            size_t* bytes);
FOVEA_C_API fovea_status fovea_backend_device(const fovea_backend* backend, fovea_device* device);
FOVEA_C_API fovea_status fovea_backend_workspace_bytes(const fovea_backend* backend,
                                                       const fovea_batch_limits* limits,
                                                       size_t* bytes);
// Fixes every buffer; nothing is allocated afterwards. `workspace` is NULL, or `bytes` bytes of the
// backend's device memory, 64-byte aligned, that outlive the backend. A call with other limits
// invalidates captured graphs and the plan.
FOVEA_C_API fovea_status fovea_backend_reserve(fovea_backend* backend,
                                               const fovea_batch_limits* limits, void* workspace,
                                               size_t bytes);
// Plans a batch, once per forward pass. After a failure there is no plan.
FOVEA_C_API fovea_status fovea_backend_plan(fovea_backend* backend, const fovea_batch* batch,
                                            void* stream);
// Runs one layer of the planned batch: stores k and v, attends, writes out and, if given, lse.
FOVEA_C_API fovea_status fovea_backend_forward(fovea_backend* backend,
                                               const fovea_layer_tensors* layer, void* stream);

enum { FOVEA_PHASE_PREFILL = 0, FOVEA_PHASE_DECODE = 1 };
// Composes backends over one pool: `decode` plans decode batches, `verify` names the one for
// target_verify, `prefill` plans the others. The parts stay handles of their own; do not plan them
// while the composition is in use.
FOVEA_C_API fovea_status fovea_compose_by_phase(fovea_backend* prefill, fovea_backend* decode,
                                                int32_t verify, fovea_backend** backend);
// Composes backends of several layer groups: layer i goes to parts[part_of_layer[i]], as layer
// layer_in_part[i] of its pool.
typedef struct fovea_layer_parts {
  uint32_t struct_size;
  int32_t layers;
  fovea_backend* const* parts;
  size_t part_count;
  const int32_t* part_of_layer;  // [layers]
  const int32_t* layer_in_part;  // [layers]
} fovea_layer_parts;
FOVEA_C_API fovea_status fovea_layer_parts_init(fovea_layer_parts* parts, size_t struct_size);
FOVEA_C_API fovea_status fovea_compose_by_layer(const fovea_layer_parts* parts,
                                                fovea_backend** backend);

// Joins attention over disjoint sets of keys by LSE.
typedef struct fovea_merger fovea_merger;
// `dtype` is the type of out. `threads` is NULL on a GPU.
FOVEA_C_API fovea_status fovea_merger_create(fovea_dtype dtype, int32_t heads, int32_t dim,
                                             fovea_device device, fovea_thread_pool* threads,
                                             fovea_merger** merger);
FOVEA_C_API fovea_status fovea_merger_destroy(fovea_merger* merger);
typedef struct fovea_attention_state {
  const DLTensor* out;  // [tokens, heads, dim]
  const DLTensor* lse;  // f32 [tokens, heads] dense, natural logarithm
} fovea_attention_state;
// Turns `into` into the state over the keys of both.
FOVEA_C_API fovea_status fovea_merger_merge(fovea_merger* merger, const fovea_attention_state* into,
                                            const fovea_attention_state* part, int64_t tokens,
                                            void* stream);

// Addresses that a captured pass contains: record them at the capture and before a replay.
typedef struct fovea_pass_addresses fovea_pass_addresses;
FOVEA_C_API fovea_status fovea_pass_addresses_create(fovea_pass_addresses** addresses);
FOVEA_C_API fovea_status fovea_pass_addresses_destroy(fovea_pass_addresses* addresses);
FOVEA_C_API fovea_status fovea_pass_addresses_add_batch(fovea_pass_addresses* addresses,
                                                        const fovea_backend* backend,
                                                        const fovea_batch* batch);
FOVEA_C_API fovea_status fovea_pass_addresses_add_layer(fovea_pass_addresses* addresses,
                                                        const fovea_backend* backend,
                                                        const fovea_layer_tensors* layer);
FOVEA_C_API fovea_status fovea_pass_addresses_add_pool(fovea_pass_addresses* addresses,
                                                       const fovea_kv_pool* pool);
FOVEA_C_API fovea_status fovea_pass_addresses_add(fovea_pass_addresses* addresses, const char* name,
                                                  const void* address);
// Compares with addresses recorded by the same calls. FOVEA_INVALID_ARGUMENT names the first array
// that moved.
FOVEA_C_API fovea_status fovea_pass_addresses_check(const fovea_pass_addresses* addresses,
                                                    const fovea_pass_addresses* now);

#ifdef __cplusplus
}
#endif

#endif  // FOVEA_C_ATTENTION_H_
