// SPDX-License-Identifier: Apache-2.0
// Linear attention on the CPU: a causal convolution, then the recurrence over the state pool.
#pragma once

#include <memory>

#include "attention/host/backend.h"

namespace fovea {

size_t host_linear_workspace_bytes(const HostShape& shape, const BatchLimits& limits);

std::unique_ptr<AttentionBackend> make_host_linear(const HostKernels& kernels,
                                                   const BackendContext& context);

}  // namespace fovea
