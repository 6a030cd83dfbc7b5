// SPDX-License-Identifier: Apache-2.0
// Parameters of the products of every head with a matrix of its own on Hopper, read by host and
// device code alike.
#pragma once

#include "kernels/cuda/common/tensor_map.h"

namespace fovea::kernels::cuda {

// Maximum of row tiles of a product with rows to skip.
constexpr int32_t kMaxSkippingTiles = 960;

// Parameters of sm90/head_gemm, with the meaning of HeadGemmParams.
struct alignas(64) HopperHeadGemmParams {
  TensorMap x;       // [tokens, heads, k], boxes [row tile, 1, 64]
  TensorMap weight;  // [heads, n, k], boxes [1, 128, 64], or [heads, k, n], boxes [1, 64, 64]
  void* out;         // [tokens, heads, n]
  int64_t out_token_stride, out_head_stride;
  const int32_t* live_tokens;  // [1] on the device: rows from here on are left untouched
  const uint8_t* skip;         // [tokens] 1: the row is left untouched; or null
  int32_t tokens;              // maximum
  int32_t n, k;
  // A group is one of the column_tiles column tiles of a head.
  int32_t row_tiles, groups, column_tiles;
};

}  // namespace fovea::kernels::cuda
