// SPDX-License-Identifier: Apache-2.0
// Absorbed MLA decode on Hopper for 64 rows a block.
#pragma once

#include "kernels/cuda/mla_decode.h"

namespace fovea::kernels::cuda {

// Returns the kernel for MlaJoins::merge or MlaJoins::pairs.
gpu::KernelVariant mla_decode_variant(const MlaDecodeSetup& setup, MlaJoins joins);

void launch_mla_decode(const MlaPass& pass, const Kernel& kernel, gpu::Launcher launcher);

}  // namespace fovea::kernels::cuda
