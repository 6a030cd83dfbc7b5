// SPDX-License-Identifier: Apache-2.0
// Parameters of MLA's up-projection on Hopper, read by host and device code alike.
#pragma once

#include "kernels/cuda/common/tensor_map.h"

namespace fovea::kernels::cuda {

// keys[t, h, :nope_dim] = w_uk[h] latents[t], values[t, h, :] = w_uv[h] latents[t], elements of one
// 16-bit type; nope_dim and v_dim at most 128, multiples of 8.
struct alignas(64) MlaProjectParams {
  TensorMap latents;         // [rows, rank], boxes [128, 64]; or, if rows are gathered:
  const void* cache;         // row r at cache + offsets[r] elements, 16-byte aligned
  const int64_t* offsets;    // [rows] -1: a row of zeros
  void* rotary;              // [rows, rope_dim]: copies of the columns after the rank; or null
  TensorMap w_uk, w_uv;      // [1, heads, nope_dim or v_dim, rank], boxes [1, 1, 128, 64]
  TensorMap keys, values;    // [rows, heads, nope_dim or v_dim], boxes [64, 1, 64]
  const int32_t* live_rows;  // [1] on the device: row tiles from here on are left untouched
  int32_t rows;              // maximum
  int32_t heads;
  int32_t rank;      // a multiple of 64
  int32_t rope_dim;  // a multiple of 8
};

}  // namespace fovea::kernels::cuda
