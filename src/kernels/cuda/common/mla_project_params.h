// SPDX-License-Identifier: Apache-2.0
// Parameters of MLA's up-projection on Hopper, read by host and device code alike.
#pragma once

#include "kernels/cuda/common/tensor_map.h"

namespace fovea::kernels::cuda {

// keys[t, h, :nope_dim] = w_uk[h] latents[t], values[t, h, :] = w_uv[h] latents[t], elements of one
// 16-bit type, strides in elements, rows 16-byte aligned.
struct alignas(64) MlaProjectParams {
  TensorMap latents;     // [rows, rank], boxes [128, 64]
  TensorMap w_uk, w_uv;  // [heads, nope_dim or v_dim, rank], boxes [1, 128, 64]
  void* keys;
  void* values;
  int64_t keys_token_stride, keys_head_stride, values_token_stride, values_head_stride;
  const int32_t* live_rows;  // [1], on the device: rows from here on stay untouched
  int32_t rows;              // at most
  int32_t heads;
  int32_t rank;             // a multiple of 64
  int32_t nope_dim, v_dim;  // at most 128, multiples of 8
};

}  // namespace fovea::kernels::cuda
