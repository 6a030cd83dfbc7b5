// SPDX-License-Identifier: Apache-2.0
// Speculation on the CPU.
#pragma once

#include <memory>
#include <span>

#include "fovea/speculation.h"

namespace fovea {

std::unique_ptr<Speculation> make_host_speculation(const SpeculationLimits& limits,
                                                   std::span<KvPool* const> pools,
                                                   ThreadPool& threads);

}  // namespace fovea
