// SPDX-License-Identifier: Apache-2.0
// Parameter block of products of a few rows with a matrix, read by host and device code alike.
#pragma once

#ifdef __CUDACC_RTC__
#include "kernels/cuda/common/types.cuh"
#else
#include <cstdint>
#endif

namespace fovea::kernels::cuda {

// out [rows, n] = x [rows, k] weight^T + bias, summed in f32. With up_offset > 0, weight rows j and
// up_offset + j are the gate and the up of output j: out = activation(gate) * up, where both are
// rounded to bf16 first.
struct SkinnyGemmParams {
  const void* x;       // bf16, rows aligned to 16 bytes
  const void* weight;  // bf16 [n or up_offset + n, k], rows aligned to 16 bytes
  const void* bias;    // one for each row of the weight, of the type of `out`, or null
  void* out;           // bf16 or f32
  int64_t x_stride, weight_stride, out_stride;  // in elements
  int32_t rows, n, k;                           // k: a multiple of kSkinnyDepth
  int32_t out_is_f32;
  int32_t up_offset;
  int32_t activation;  // a GatedActivation
  float alpha, limit;
};

constexpr int kSkinnyDepth = 64;

}  // namespace fovea::kernels::cuda
