// SPDX-License-Identifier: Apache-2.0
// Parameters of the products of every head with a matrix of its own on Hopper, read by host and
// device code alike.
#pragma once

#include "kernels/cuda/common/tensor_map.h"

namespace fovea::kernels::cuda {

// Row tiles of a product with rows to skip, at most.
constexpr int32_t kMostSkippingTiles = 960;

// As HeadGemmParams.
struct alignas(64) HopperHeadGemmParams {
  TensorMap x;       // [tokens, heads, k], boxes [row tile, 1, 64]
  TensorMap weight;  // [heads, n, k], boxes [1, 128, 64], or [heads, k, n], boxes [1, 64, 64]
  void* out;         // [tokens, heads, n]
  int64_t out_token_stride, out_head_stride;
  const int32_t* live_tokens;  // [1], on the device: rows from here on stay untouched
  const uint8_t* skip;         // [tokens] 1: this row too; or null
  int32_t tokens;              // at most
  int32_t n, k;
  // Groups are column tiles of a head, of which there are column_tiles.
  int32_t row_tiles, groups, column_tiles;
};

}  // namespace fovea::kernels::cuda
