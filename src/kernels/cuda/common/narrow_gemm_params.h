// SPDX-License-Identifier: Apache-2.0
// Parameters of products of 9 to 128 rows on Hopper, read by host and device code alike.
#pragma once

#include "kernels/cuda/common/skinny_gemm_params.h"
#include "kernels/cuda/common/tensor_map.h"

namespace fovea::kernels::cuda {

// A product as SkinnyGemmParams describes it. `splits` blocks of a cluster share a tile's k.
struct alignas(64) NarrowGemmParams {
  // The weight as [16 rows][2][8][k], boxes [tile / 16][2][8][64]: with gates, the 2 are the gates
  // and the ups of the same 8 outputs.
  TensorMap weight;
  TensorMap x;  // [rows, k], boxes [row tile, 64]
  SkinnyGemmParams product;
  int32_t splits;
};

constexpr int kNarrowDepth = 128;    // k is a multiple of it
constexpr int kMaxNarrowSplits = 3;  // blocks that share k

}  // namespace fovea::kernels::cuda
