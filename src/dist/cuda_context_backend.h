// SPDX-License-Identifier: Apache-2.0
// Attention backends of GPUs whose context is distributed over ranks.
#pragma once

#include <memory>

#include "dist/context_links.h"
#include "fovea/context_parallel.h"

namespace fovea {

// As make_context_backend(), with the links of the rank, which must outlive the backend unless it
// gets `own`, the same object, too.
std::unique_ptr<AttentionBackend> make_cuda_context_backend(std::unique_ptr<AttentionBackend> local,
                                                            const ContextBackendOptions& options,
                                                            ContextLinks& links,
                                                            std::unique_ptr<ContextLinks> own = {});

// Returns the bytes of workspace of such a backend besides those of its local backend.
size_t context_workspace_bytes(const ContextBackendOptions& options, const BatchLimits& limits);

}  // namespace fovea
