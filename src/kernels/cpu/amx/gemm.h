// SPDX-License-Identifier: Apache-2.0
// Products by the tiles of AMX.
#pragma once

#include "kernels/cpu/simd/gemm.h"

namespace fovea::kernels::cpu::amx {

// Multiplies by weights [n, k] of bf16. Requires Isa::amx.
void gemm_nk(const GemmParams& params, const GemmRange& range);

}  // namespace fovea::kernels::cpu::amx
