// SPDX-License-Identifier: Apache-2.0
// Rows of the backend table for backends that run on a GPU.
#pragma once

#include <span>
#include <vector>

#include "attention/capability.h"
#include "attention/cuda/kernels.h"
#include "fovea/select_backend.h"
#include "gpu/kernel_pack.h"

namespace fovea {

// Returns everything that the kernels' parameters can express. A row adds its architectures and
// head dims, and may remove features.
Capability cuda_capability();

// Appends a reason for every kernel that can neither be found nor compiled.
void append_missing_kernels(std::span<const gpu::KernelVariant> needed,
                            std::vector<Reason>& reasons);
// Appends the reasons against limits that exceed the rows of a grid.
void append_limit_reasons(const BatchLimits& limits, std::vector<Reason>& reasons);

// Fills in reject, workspace_bytes, create and graphs of `entry`. kernels must outlive the entry.
BackendEntry cuda_entry(BackendEntry entry, const CudaKernels& kernels,
                        const Capability& capability);

}  // namespace fovea
