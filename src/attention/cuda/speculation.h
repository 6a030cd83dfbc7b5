// SPDX-License-Identifier: Apache-2.0
// Speculation on a GPU.
#pragma once

#include <memory>
#include <span>

#include "fovea/speculation.h"

namespace fovea {

std::unique_ptr<Speculation> make_cuda_speculation(const SpeculationLimits& limits,
                                                   std::span<KvPool* const> pools, Device device);

}  // namespace fovea
