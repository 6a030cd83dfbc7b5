// SPDX-License-Identifier: Apache-2.0
// Recurrent layers on a GPU. plan() reads lengths and slots on the
// device. forward() convolves and runs the recurrence: token by token in f32, or prompts in chunks
// by bf16 products where the spec and the GPU allow it.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "fovea/attention_backend.h"
#include "fovea/device.h"
#include "fovea/select_backend.h"
#include "gpu/kernel_pack.h"

namespace fovea {

size_t cuda_linear_workspace_bytes(const AttentionSpec& spec, const BatchLimits& limits,
                                   const DeviceInfo& device);

// Returns every kernel that layers of this spec run.
std::vector<gpu::KernelVariant> cuda_linear_variants(const AttentionSpec& spec,
                                                     const DeviceInfo& device);

// Loads every kernel, and compiles those that no pack has. Errors as BackendEntry::create.
std::unique_ptr<AttentionBackend> make_cuda_linear(std::string_view name,
                                                   const BackendContext& context);

}  // namespace fovea
