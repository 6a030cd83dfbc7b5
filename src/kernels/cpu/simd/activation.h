// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

#include "kernels/cpu/simd/isas.h"

namespace fovea::kernels::cpu {

// out[i] = up[i * step] * a(gate[i * step]) for a row, by Activation of kernels/layer_ops.h.
struct ActivatedRow {
  const float* gate = nullptr;
  const float* up = nullptr;
  float* out = nullptr;  // may be gate or up if step is 1
  int32_t dim = 0;
  int32_t step = 1;            // 1 or 2
  float alpha = 1, limit = 0;  // clamped_swiglu
};

#define FOVEA_DECLARE(isa)                       \
  namespace isa {                                \
  void activate_silu(const ActivatedRow& row);   \
  void activate_gelu(const ActivatedRow& row);   \
  void activate_swiglu(const ActivatedRow& row); \
  }
FOVEA_FOR_EACH_ISA(FOVEA_DECLARE)
#undef FOVEA_DECLARE

}  // namespace fovea::kernels::cpu
