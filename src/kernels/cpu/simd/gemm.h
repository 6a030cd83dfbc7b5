// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

#include "kernels/cpu/simd/isas.h"
#include "kernels/gemm.h"

namespace fovea::kernels::cpu {

// The max block size of sums over k. A block starts from zero and is then added to the output, so
// rounding errors grow with the block, not with k. With 640, six rows of x and four rows of the
// weight fit a 32 KiB cache.
inline constexpr int32_t kGemmDepth = 640;

// Returns the block size for sums over k: equal blocks up to the last, because the end of a block
// takes as long as many steps within.
constexpr int32_t gemm_depth(int32_t k) {
  const int32_t blocks = k <= kGemmDepth ? 1 : (k + kGemmDepth - 1) / kGemmDepth;
  return ((k + blocks - 1) / blocks + 31) / 32 * 32;
}

// Weight rows ([n, k]) or columns ([k, n]) that a task converts to f32 at a time, on its stack: 160
// KiB.
inline constexpr int32_t kGemmPanel = 64;

// The part of the output that one task computes.
struct GemmRange {
  int32_t row_begin = 0, row_end = 0;
  int32_t n_begin = 0, n_end = 0;
};

#define FOVEA_DECLARE(isa)                                        \
  namespace isa {                                                 \
  void gemm_nk(const GemmParams& params, const GemmRange& range); \
  void gemm_kn(const GemmParams& params, const GemmRange& range); \
  }
FOVEA_FOR_EACH_ISA(FOVEA_DECLARE)
#undef FOVEA_DECLARE

}  // namespace fovea::kernels::cpu
