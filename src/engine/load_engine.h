// SPDX-License-Identifier: Apache-2.0
// Loads an engine, or one rank of it.
#pragma once

#include <memory>

#include "fovea/communicator.h"
#include "fovea/engine.h"

namespace fovea {

// Does what Engine::load() does. With `ranks`, which must outlive the engine, the model is the part
// of the communicator's rank; the device must be the CPU.
std::unique_ptr<Engine> load_engine(const EngineOptions& options, Communicator* ranks);

}  // namespace fovea
