// SPDX-License-Identifier: Apache-2.0
// The cache and the backends of each layer group, from the engine's options.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/cache_set.h"
#include "fovea/engine.h"
#include "fovea/select_backend.h"
#include "model/model.h"

namespace fovea {

// The caches of a model in the dtype the options ask for. Throws Error{unsupported} or
// {invalid_argument} naming the option that a group cannot follow.
std::vector<CacheGroup> cache_groups(const ModelInfo& model, const EngineOptions& options);

// One per group, in their order. The registry outlives the result. Throws as select_backend, and
// Error{invalid_argument} where batch_invariant contradicts two different backends.
std::vector<GroupSelection> select_group_backends(const ModelInfo& model,
                                                  const std::vector<CacheGroup>& caches,
                                                  const EngineOptions& options,
                                                  const BatchLimits& limits,
                                                  const DeviceInfo& device);

// Creates and reserves what was selected.
std::unique_ptr<AttentionBackend> create_group_backend(const GroupSelection& selection,
                                                       const BackendContext& context);

std::string explain(const GroupSelection& selection);

}  // namespace fovea
