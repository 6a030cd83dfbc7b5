// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

#include "fovea/dtype.h"
#include "kernels/cpu/simd/isas.h"

namespace fovea::kernels::cpu {

// Sets to[i] = from[i] / scale, by the rules of kernels/kv_write.h. Needs no alignment.
struct CacheRowWrite {
  const void* from = nullptr;
  DType from_dtype = DType::f32;  // f32, f16 or bf16
  void* to = nullptr;
  DType to_dtype = DType::f32;  // f32, f16, bf16 or fp8
  int32_t dim = 0;
  float scale = 1;
  float finite_limit = 0;  // > 0: NaN becomes 0, magnitudes are limited to this
};

#define FOVEA_DECLARE(isa)                                             \
  namespace isa {                                                      \
  void write_cache_row(const CacheRowWrite& row);                      \
  /* Over the finite values; 0 when there is none. */                  \
  float largest_magnitude(const void* from, DType dtype, int32_t dim); \
  }
FOVEA_FOR_EACH_ISA(FOVEA_DECLARE)
#undef FOVEA_DECLARE

}  // namespace fovea::kernels::cpu
