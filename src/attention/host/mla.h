// SPDX-License-Identifier: Apache-2.0
// Multi-head latent attention on the CPU: each request of a batch runs in the form that is cheaper
// for its lengths, all read the cache, where this pass's own rows have just been stored. So a
// quantised cache gives the same results for a row whether it was computed now or found there.
#pragma once

#include <memory>

#include "attention/host/backend.h"
#include "attention/mla_forms.h"

namespace fovea {

size_t host_mla_workspace_bytes(const HostShape& shape, const BatchLimits& limits,
                                const MlaOptions& options = {});

std::unique_ptr<AttentionBackend> make_host_mla(const HostKernels& kernels,
                                                const BackendContext& context,
                                                const MlaOptions& options = {});

}  // namespace fovea
