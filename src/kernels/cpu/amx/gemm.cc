// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/amx/gemm.h"

#include "kernels/cpu/amx/gemm_tiles.h"
#include "kernels/cpu/amx/tiles.h"

namespace fovea::kernels::cpu::amx {

void gemm_nk(const GemmParams& params, const GemmRange& range) { multiply<Tiles>(params, range); }

}  // namespace fovea::kernels::cpu::amx
