// SPDX-License-Identifier: Apache-2.0
// Rows of the backend table for backends that run on the CPU.
#pragma once

#include "attention/capability.h"
#include "attention/host/kernels.h"
#include "fovea/select_backend.h"

namespace fovea {

// Returns everything that backends on the CPU can do. A row may remove features.
Capability host_capability();

// Fills in reject, workspace_bytes, create and graphs of `entry`. kernels must outlive the entry.
BackendEntry host_entry(BackendEntry entry, const HostKernels& kernels,
                        const Capability& capability);

}  // namespace fovea
