// SPDX-License-Identifier: Apache-2.0
// Softmax attention over K and V heads on the CPU: decoder, encoder and cross, paged or ragged.
#pragma once

#include <memory>

#include "attention/host/backend.h"

namespace fovea {

size_t host_mha_workspace_bytes(const HostShape& shape, const BatchLimits& limits);

std::unique_ptr<AttentionBackend> make_host_mha(const HostKernels& kernels,
                                                const BackendContext& context);

}  // namespace fovea
