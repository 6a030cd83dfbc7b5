// SPDX-License-Identifier: Apache-2.0
// Parameter blocks of the kernels around up-projected MLA, read by host and device code alike.
// Elements are of one 16-bit type; strides count elements, rows are 16-byte aligned.
#pragma once

#ifdef __CUDACC_RTC__
#include "kernels/cuda/common/types.cuh"
#else
#include <cstdint>
#endif

namespace fovea::kernels::cuda {

// A chunk of the rows of up-projected requests, as attention takes it: part of their context, or
// all their tokens.
struct MlaChunk {
  int32_t* live_rows;  // [1] rows of the chunk
  int32_t* begin;      // [requests] first row of each request
  int32_t* lens;       // [requests] rows of each request
  int32_t* indptr;     // [requests + 1] copy of q_indptr; all zero if the chunk is empty
  int32_t max_rows;
};

// Chooses the form of every request: up-projected from min_q_len new tokens on, if that takes
// fewer multiply-adds (choose_mla_form) or by_q_len says so, as long as all chosen requests have at
// most max_rows rows. One block.
struct MlaFormsParams {
  const int32_t* q_indptr;  // [requests + 1]
  const int32_t* kv_lens;   // [requests]
  int32_t requests;
  int32_t kv_lora_rank, nope_dim, v_dim;
  int32_t min_q_len;
  int32_t by_q_len;
  int32_t at_once;  // rows are all tokens of a request; otherwise the tokens before its new ones
  int32_t max_rows;
  uint8_t* up_requests;  // [requests] 1: up-projected
  uint8_t* up_tokens;    // [tokens]
  int32_t* new_lens;     // [requests] new tokens of up-projected requests, 0 for others
  int32_t* row_indptr;   // [requests + 1] rows of up-projected requests
  MlaChunk chunk;        // the first chunk
};

// Gathers rows [first_row, first_row + max_rows) of up-projected requests, in request order, from
// the cache: latents and rotary keys, or their offsets. fp8 values become 16-bit. Also writes the
// chunk's description for attention.
struct MlaGatherParams {
  const void* cache;  // row of (page, place): page * page_stride + place * token_stride elements
  int64_t page_stride, token_stride;
  int32_t fp8_rows;           // e4m3 caches: rows of kernels/mla_row.h
  const float* scale;         // other e4m3 caches: scale[s * stride] of slot s; null: 1
  int64_t scale_slot_stride;  // 0: one scale for all slots
  const int32_t* page_table;  // [requests, page_table_stride]
  int64_t page_table_stride;
  int32_t page_size;
  const int32_t* q_indptr;
  const int32_t* kv_lens;
  int32_t requests;
  const int32_t* row_indptr;   // [requests + 1]: q_indptr; for a chunk MlaFormsParams::row_indptr
  const uint8_t* up_requests;  // [requests]
  int32_t of_chunk;  // rows start at a request's first token; otherwise at its first new token
  int32_t first_row, max_rows;
  int32_t kv_lora_rank, rope_dim, nope_dim, heads;
  void* rows;  // [max_rows, kv_lora_rank + rope_dim]: latents and rotary keys
  // [max_rows] instead of rows: their offsets in the cache in elements, -1: no row. Or null.
  int64_t* offsets;
  void* keys;      // [max_rows, heads, nope_dim + rope_dim], to repeat the rotary key in; or null
  MlaChunk chunk;  // written if of_chunk
  // [tokens, heads] is set to -inf, for rows that see no key of a chunk whose attention is added.
  // Or null.
  float* part_lse;
  int64_t part_rows;  // tokens times heads
};

// Joins the two parts of every query to one row. One warp for each (token, head) row.
struct MlaJoinParams {
  const void* nope;  // [tokens, heads, nope_dim]
  const void* rope;  // [tokens, heads, rope_dim]
  int64_t nope_token_stride, nope_head_stride, rope_token_stride, rope_head_stride;
  void* out;  // [tokens, heads, nope_dim + rope_dim], dense
  int32_t tokens, heads, nope_dim, rope_dim;
};

}  // namespace fovea::kernels::cuda
