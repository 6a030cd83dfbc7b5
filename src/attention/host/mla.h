// SPDX-License-Identifier: Apache-2.0
// Multi-head latent attention on the CPU. Each request of a batch runs in the form that is cheaper
// for its lengths. All requests read the cache, in which this pass has stored its own rows first,
// so a quantised cache gives a row the same results in the pass that computes it and in later ones.
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
