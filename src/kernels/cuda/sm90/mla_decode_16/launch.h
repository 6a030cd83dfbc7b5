// SPDX-License-Identifier: Apache-2.0
// Absorbed MLA decode on Hopper for 16 rows a block, over 16-bit caches.
#pragma once

#include "kernels/cuda/mla_decode.h"

namespace fovea::kernels::cuda {

// Returns the kernel for MlaJoins::blocks or MlaJoins::clusters.
gpu::KernelVariant mla_decode_16_variant(const MlaDecodeSetup& setup, MlaJoins joins);

void launch_mla_decode_16(const MlaPass& pass, const Kernel& kernel, gpu::Launcher launcher);

}  // namespace fovea::kernels::cuda
