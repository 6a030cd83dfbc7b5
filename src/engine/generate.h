// SPDX-License-Identifier: Apache-2.0
// Engine::generate for all engines: a loop over add() and step().
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "fovea/engine.h"

namespace fovea {

// The parts of an engine that the loop needs.
struct GenerateLoop {
  Engine& engine;
  const int64_t& next_id;           // id of the next request that add() queues
  std::vector<TokenEvent>& events;  // events that step() has not yet returned
};

std::vector<GenerateResult> generate_by_steps(
    const GenerateLoop& loop, std::span<const GenerateRequest> requests,
    const std::function<void(const TokenEvent&)>& on_token, const std::function<bool()>& stop);

}  // namespace fovea
