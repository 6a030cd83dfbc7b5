// SPDX-License-Identifier: Apache-2.0
// Parameters of the products of every head with a matrix of its own, read by host and device code
// alike.
#pragma once

#ifdef __CUDACC_RTC__
#include "kernels/cuda/common/types.cuh"
#else
#include <cstdint>
#endif

namespace fovea::kernels::cuda {

// out[t, h, :] = x[t, h, :] weight[h], elements of one 16-bit type, summed in f32 over k in
// ascending order with every tile. Rows of a head are contiguous; they and the rows of the weights
// are 16-byte aligned; n and k are multiples of 8. Grid: row tiles times `groups`, which share the
// column tiles of all heads.
struct HeadGemmParams {
  const void* x;  // [tokens, heads, k]
  int64_t x_token_stride, x_head_stride;
  const void* weight;  // [heads, n, k], or [heads, k, n]
  int64_t weight_head_stride, weight_row_stride;
  void* out;  // [tokens, heads, n]
  int64_t out_token_stride, out_head_stride;
  const int32_t* live_tokens;  // [1] on the device: rows from here on are left untouched
  const uint8_t* skip;         // [tokens] 1: the row is left untouched; or null. 16-byte aligned
  int32_t tokens;              // maximum
  int32_t n, k;
  int32_t heads;
  int32_t row_tiles, groups;
};

}  // namespace fovea::kernels::cuda
