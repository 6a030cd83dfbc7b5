// SPDX-License-Identifier: Apache-2.0
// Softmax attention over K and V heads on a GPU. plan() builds the page table and orders the work
// on the device, by the batch's lengths. forward() stores new keys and works through the list.
#pragma once

#include <memory>

#include "attention/cuda/kernels.h"
#include "fovea/attention_backend.h"

namespace fovea {

size_t cuda_workspace_bytes(const CudaKernels& kernels, const kernels::cuda::AttentionSetup& setup,
                            const BatchLimits& limits);

// Loads every kernel, and compiles those that no pack has. Errors as BackendEntry::create.
std::unique_ptr<AttentionBackend> make_cuda_backend(const CudaKernels& kernels,
                                                    const BackendContext& context);

}  // namespace fovea
