// SPDX-License-Identifier: Apache-2.0
// Chooses the cache and the backend of each layer group from the engine's options.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/cache_set.h"
#include "fovea/engine.h"
#include "fovea/select_backend.h"
#include "model/model.h"

namespace fovea {

class ContextLinks;

// Returns the caches of a model in the dtype that the options request. Throws Error{unsupported} or
// {invalid_argument} naming an option that a group does not support.
std::vector<CacheGroup> cache_groups(const ModelInfo& model, const EngineOptions& options);

// Returns one selection per group, in the same order. The registry must outlive the result. Throws
// as select_backend() does, and Error{invalid_argument} if batch_invariant is requested and phases
// select different backends.
std::vector<GroupSelection> select_group_backends(const ModelInfo& model,
                                                  const std::vector<CacheGroup>& caches,
                                                  const EngineOptions& options,
                                                  const BatchLimits& limits,
                                                  const DeviceInfo& device);

// The ranks of a group whose context is distributed, and the limits of its batches; those of the
// selection are a rank's own.
struct GroupRanks {
  int32_t context_ranks = 1;  // LayerGroup::context_ranks
  Communicator* communicator = nullptr;
  ContextLinks* links = nullptr;  // on a GPU
  BatchLimits limits = {};
};

// Creates the selected backend and reserves its buffers.
std::unique_ptr<AttentionBackend> create_group_backend(const GroupSelection& selection,
                                                       const BackendContext& context,
                                                       const GroupRanks& ranks = {});

std::string explain(const GroupSelection& selection);

}  // namespace fovea
