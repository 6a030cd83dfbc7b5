// SPDX-License-Identifier: Apache-2.0
// The write of new latents and rotary keys to a cache of KvLayout::mla_fp8_rows, on a GPU.
#pragma once

#include "fovea/dtype.h"
#include "gpu/kernel_pack.h"

namespace fovea::kernels::cuda {

// The kernel that stores rows of dtype `written`; KvWrite launches it. Error{invalid_argument}
// where there is none.
gpu::KernelVariant mla_row_write_variant(DType written, int sm);

}  // namespace fovea::kernels::cuda
