// SPDX-License-Identifier: Apache-2.0
// Rows of the backend table for backends that run on the CPU.
#pragma once

#include "attention/capability.h"
#include "attention/host/kernels.h"
#include "fovea/select_backend.h"

namespace fovea {

// Everything the host backends can do; a row may take something away.
Capability host_capability();

// Fills reject, workspace_bytes, create and graphs of `entry`. kernels outlives the entry.
BackendEntry host_entry(BackendEntry entry, const HostKernels& kernels,
                        const Capability& capability);

}  // namespace fovea
