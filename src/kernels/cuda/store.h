// SPDX-License-Identifier: Apache-2.0
// The kernel store of the process: one pack, one cache folder, one rule about compiling. It is the
// one global object of the GPU side. It reads the environment variables that fovea/kernel_pack.h
// lists, and prints a line to stderr when it compiles a kernel. Selection asks it which kernels
// exist, so on a GPU the answer of a backend's `reject` depends on the request, the build and this
// store.
#pragma once

#include "gpu/kernel_pack.h"

namespace fovea::kernels::cuda {

// Reads the environment anew at every call.
gpu::KernelStoreOptions kernel_store_options();

// Returns the store, which the first call opens. Throws Error{corrupt_file} or Error{io} if the
// pack cannot be read.
gpu::KernelStore& kernel_store();

}  // namespace fovea::kernels::cuda
