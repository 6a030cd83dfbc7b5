// SPDX-License-Identifier: Apache-2.0
// Rows of the backend table for latent attention on a GPU.
#pragma once

#include "attention/capability.h"
#include "attention/cuda/mla_kernels.h"
#include "fovea/select_backend.h"

namespace fovea {

// Everything the kernels' parameters can express; a row adds its architectures and may take
// something away.
Capability mla_capability();

// Fills the name and every function of `entry`. kernels outlives the entry.
BackendEntry mla_entry(BackendEntry entry, const MlaKernels& kernels, const Capability& capability);

}  // namespace fovea
