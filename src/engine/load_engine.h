// SPDX-License-Identifier: Apache-2.0
// Loads an engine, or one rank of it.
#pragma once

#include <memory>

#include "fovea/engine.h"
#include "model/device.h"

namespace fovea {

// Does what Engine::load() does. With ranks, the model is the part of the communicator's rank,
// which must outlive the engine; options.device is the one it communicates on. If they share
// contexts, options.page_size counts the tokens of a page on all ranks together. With host_draws,
// the runners of a CPU draw tokens, as those of a GPU do.
std::unique_ptr<Engine> load_engine(const EngineOptions& options, const ModelRanks& ranks = {},
                                    bool host_draws = false);

}  // namespace fovea
