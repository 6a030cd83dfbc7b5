// SPDX-License-Identifier: Apache-2.0
// The process's kernels: one pack, one cache folder, one rule about compiling.
// fovea/kernel_pack.h lists the environment variables.
#pragma once

#include "gpu/kernel_pack.h"

namespace fovea::kernels::cuda {

// From the environment, each time anew.
gpu::KernelStoreOptions kernel_store_options();

// Opened at the first call. Error{corrupt_file} or Error{io} when the pack cannot be read.
gpu::KernelStore& kernel_store();

}  // namespace fovea::kernels::cuda
