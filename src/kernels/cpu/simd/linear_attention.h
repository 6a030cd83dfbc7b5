// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

#include "kernels/cpu/simd/isas.h"
#include "kernels/linear_attention.h"

namespace fovea::kernels::cpu {

// The new tokens of one request and the place of its state.
struct StateSpan {
  int64_t begin = 0, end = 0;
  int64_t slot = 0;
  bool from_zero = false;  // the slot holds no state of this request yet
};

// The rows of one head's state that a task computes for all tokens.
struct HeadRange {
  int32_t head = 0;
  int32_t row_begin = 0, row_end = 0;
};

#define FOVEA_DECLARE(isa)                                                                     \
  namespace isa {                                                                              \
  void convolve_channels(const CausalConvParams& params, const StateSpan& span, int32_t begin, \
                         int32_t end);                                                         \
  void gated_delta_net_rows(const GatedDeltaNetParams& params, const StateSpan& span,          \
                            const HeadRange& range);                                           \
  void mamba2_rows(const Mamba2Params& params, const StateSpan& span, const HeadRange& range); \
  }
FOVEA_FOR_EACH_ISA(FOVEA_DECLARE)
#undef FOVEA_DECLARE

}  // namespace fovea::kernels::cpu
