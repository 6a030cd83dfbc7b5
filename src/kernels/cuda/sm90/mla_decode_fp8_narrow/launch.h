// SPDX-License-Identifier: Apache-2.0
// Absorbed MLA decode on Hopper for 16 or 32 rows a block, over fp8 caches.
#pragma once

#include "kernels/cuda/mla_decode.h"

namespace fovea::kernels::cuda {

gpu::KernelVariant mla_decode_fp8_narrow_variant(const MlaDecodeSetup& setup, int32_t rows);

void launch_mla_decode_fp8_narrow(const MlaPass& pass, int32_t rows, const Kernel& kernel,
                                  gpu::Launcher launcher);

}  // namespace fovea::kernels::cuda
