// SPDX-License-Identifier: Apache-2.0
// Rows of the backend table for latent attention on a GPU.
#pragma once

#include "attention/capability.h"
#include "attention/cuda/mla_kernels.h"
#include "fovea/select_backend.h"

namespace fovea {

// Returns everything that the kernels' parameters can express. A row adds its architectures, and
// may remove features.
Capability mla_capability();

// Fills in the name and every function of `entry`. kernels must outlive the entry.
BackendEntry mla_entry(BackendEntry entry, const MlaKernels& kernels, const Capability& capability);

}  // namespace fovea
