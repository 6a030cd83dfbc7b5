// SPDX-License-Identifier: Apache-2.0
// Rows of the backend table for backends that run on a GPU.
#pragma once

#include "attention/backends/cuda_kernels.h"
#include "attention/capability.h"
#include "fovea/select_backend.h"

namespace fovea {

// Everything the kernels' parameters can express; a row adds its architectures and head dims, and
// may take something away.
Capability cuda_capability();

// Fills reject, workspace_bytes, create and graphs of `entry`. kernels outlives the entry.
BackendEntry cuda_entry(BackendEntry entry, const CudaKernels& kernels,
                        const Capability& capability);

}  // namespace fovea
