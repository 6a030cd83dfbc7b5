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

// Rows of up-projected requests as attention takes them, on the device: a chunk of their context,
// or all their tokens.
struct MlaChunk {
  int32_t* live_rows;  // [1] its rows
  int32_t* begin;      // [requests] where a request's rows begin
  int32_t* lens;       // [requests] how many they are
  int32_t* indptr;     // [requests + 1] q_indptr once more, all zero where the chunk is empty
  int32_t most_rows;
};

// Chooses the form of every request: up-projected where that takes fewer multiply-adds
// (choose_mla_form) or in any case (by_q_len), from min_q_len new tokens on, and while they have
// most_rows rows at most in all. One block.
struct MlaFormsParams {
  const int32_t* q_indptr;  // [requests + 1]
  const int32_t* kv_lens;   // [requests]
  int32_t requests;
  int32_t kv_lora_rank, nope_dim, v_dim;
  int32_t min_q_len;
  int32_t by_q_len;
  int32_t at_once;  // rows are all tokens of a request; else those before the new ones
  int32_t most_rows;
  uint8_t* up_requests;  // [requests] 1: up-projected
  uint8_t* up_tokens;    // [tokens]
  int32_t* new_lens;     // [requests] new tokens of up-projected requests, 0 of others
  int32_t* row_indptr;   // [requests + 1] rows of up-projected requests
  MlaChunk chunk;        // the first
};

// Rows [first_row, first_row + most_rows) of up-projected requests, in request order, out of the
// cache: latents and rotary keys, or where they lie. fp8 caches become 16-bit. Of a chunk also what
// attention needs to know about it.
struct MlaGatherParams {
  const void* cache;  // row of (page, place): page * page_stride + place * token_stride elements
  int64_t page_stride, token_stride;
  int32_t fp8_rows;           // e4m3: rows of kernels/mla_row.h
  const float* scale;         // e4m3 otherwise: of slot s scale[s * stride], or null: 1
  int64_t scale_slot_stride;  // 0: one for all
  const int32_t* page_table;  // [requests, page_table_stride]
  int64_t page_table_stride;
  int32_t page_size;
  const int32_t* q_indptr;
  const int32_t* kv_lens;
  int32_t requests;
  const int32_t* row_indptr;   // [requests + 1]: q_indptr, or of a chunk MlaFormsParams::row_indptr
  const uint8_t* up_requests;  // [requests]
  int32_t of_chunk;  // rows begin with a request's first token; else with its first new one
  int32_t first_row, most_rows;
  int32_t kv_lora_rank, rope_dim, nope_dim, heads;
  void* rows;  // [most_rows, kv_lora_rank + rope_dim]: latents and rotary keys
  int64_t*
      offsets;     // [most_rows] instead of rows: where they lie in the cache, -1: nowhere. Or null
  void* keys;      // [most_rows, heads, nope_dim + rope_dim], to repeat the rotary key in; or null
  MlaChunk chunk;  // written where of_chunk
  // Of a chunk whose attention is added: [tokens, heads] becomes -inf, for rows that see none of
  // it. Or null.
  float* part_lse;
  int64_t part_rows;  // tokens times heads
};

// Adds the part of a context chunk, or any state, to the result so far.
struct MlaAddParams {
  void* out;         // [tokens, heads, v_dim]
  const void* part;  // [tokens, heads, v_dim]
  int64_t out_token_stride, out_head_stride, part_token_stride, part_head_stride;
  float* lse;                // [tokens, heads]
  const float* part_lse;     // [tokens, heads]; -inf: nothing to add
  const int32_t* live_rows;  // [1] of the chunk; 0: it was not computed. Null: it was
  const int32_t* q_indptr;   // [requests + 1]: tokens behind the last are left out. Null: none is
  int32_t requests, tokens, heads, v_dim;
};

// Two parts of every query side by side. A warp a (token, head) row.
struct MlaJoinParams {
  const void* nope;  // [tokens, heads, nope_dim]
  const void* rope;  // [tokens, heads, rope_dim]
  int64_t nope_token_stride, nope_head_stride, rope_token_stride, rope_head_stride;
  void* out;  // [tokens, heads, nope_dim + rope_dim], dense
  int32_t tokens, heads, nope_dim, rope_dim;
};

}  // namespace fovea::kernels::cuda
