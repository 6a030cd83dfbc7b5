// SPDX-License-Identifier: Apache-2.0
// Parameter blocks of the kernels that `fovea bench` and tests measure with, read by host and
// device code alike.
#pragma once

#ifdef __CUDACC_RTC__
#include "kernels/cuda/common/types.cuh"
#else
#include <cstdint>
#endif

namespace fovea::kernels::cuda {

struct EmptyParams {
  int32_t unused;
};

// Reads `bytes` (a multiple of 16 KB) of `data`, 16-byte aligned.
struct ReadParams {
  const void* data;
  int64_t bytes;
  uint32_t* sink;  // [1]; keeps the loads alive
};

struct LateCopyParams {
  const void* from;
  void* to;        // 16-byte aligned as `from`
  int64_t bytes;   // a multiple of 16
  int64_t cycles;  // delay before the copy
};

// Element i becomes offset + factor * n, n from the sum of twelve uniform bytes: nearly
// normal, the same for the same seed on every device.
struct NoiseParams {
  void* data;
  int64_t count;
  int64_t row, row_stride;  // element i lies at i / row * row_stride + i % row
  uint32_t seed;
  float offset, factor;
};

struct NotFiniteParams {
  const void* data;
  int64_t count;
  uint64_t* found;  // [1], added to
};

// One (token, q head) row to check.
struct SampledRow {
  int32_t request;
  int32_t token;  // index in the batch
  int32_t q_head;
  int32_t key_begin, key_end;  // visible keys of the request
};

// The difference from plain fp64 attention over the same cache.
struct RowError {
  double squared_error, squared_norm;
};

// Element (slot, head) of K: k + slot / page_size * k_page_stride + slot % page_size *
// k_token_stride + head * k_head_stride elements; with mla_fp8_rows strides count bytes and a row
// is that of kernels/mla_row.h. Scale of (slot, head): k_scale[slot *
// scale_slot_stride + head * scale_head_stride], or null.
struct AttentionRowsParams {
  const SampledRow* rows;
  RowError* errors;       // [rows]
  double* scores;         // [rows, scores_stride]
  int64_t scores_stride;  // at least the longest row
  const void* q;          // [tokens, q_heads, head_dim]
  const void* out;        // [tokens, q_heads, head_dim_v]
  const void* k;
  const void* v;
  int64_t k_page_stride, k_token_stride, k_head_stride;
  int64_t v_page_stride, v_token_stride, v_head_stride;
  const float* k_scale;
  const float* v_scale;
  int64_t scale_slot_stride, scale_head_stride;
  const int32_t* slots;  // [requests, slots_stride]
  int64_t slots_stride;
  int32_t page_size;
  int32_t mla_fp8_rows;
  int32_t q_heads, kv_heads, head_dim, head_dim_v;
  double scale;
  double logit_cap;           // 0: none
  const float* sinks;         // [q_heads] or null
  const float* alibi_slopes;  // [q_heads] or null, of the distance from the row's last key
};

}  // namespace fovea::kernels::cuda
