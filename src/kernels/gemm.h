// SPDX-License-Identifier: Apache-2.0
// Products of f32 activations with weights in their stored dtype. The order of each output
// element's sum depends on k alone, so the bits of a row do not depend on other rows.
#pragma once

#include <cstdint>

#include "fovea/dtype.h"

namespace fovea::kernels {

// out = x * weight^T + bias.
struct GemmParams {
  const float* x = nullptr;         // [rows, k]
  int64_t x_stride = 0;             // elements between rows
  const void* weight = nullptr;     // [n, k], or [k, n] with weight_is_kn
  DType weight_dtype = DType::f32;  // f32, bf16 or f16
  int64_t weight_stride = 0;        // elements between rows of weight
  bool weight_is_kn = false;
  const float* bias = nullptr;  // [n] or null
  float* out = nullptr;         // [rows, n]
  int64_t out_stride = 0;
  int32_t rows = 0, n = 0, k = 0;
};

}  // namespace fovea::kernels
