// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

#include "kernels/cpu/simd/isas.h"
#include "kernels/merge_states.h"

namespace fovea::kernels::cpu {

// `begin` and `end` count pairs of a row and a head: they are in [0, rows * heads].
#define FOVEA_DECLARE(isa)                                                            \
  namespace isa {                                                                     \
  void merge_state_rows(const MergeStatesParams& params, int64_t begin, int64_t end); \
  }
FOVEA_FOR_EACH_ISA(FOVEA_DECLARE)
#undef FOVEA_DECLARE

}  // namespace fovea::kernels::cpu
