// SPDX-License-Identifier: Apache-2.0
// A device that is described instead of used: it counts what a model would place on it, so that any
// size can be planned on any machine.
#pragma once

#include <memory>

#include "model/device.h"

namespace fovea {

// Weights are checked and counted as the device's own ModelDevice does, and go nowhere. Pointers to
// them are not null and must not be followed. Operations and allocations are Error{unsupported}.
std::unique_ptr<ModelDevice> make_counting_device(const DeviceInfo& device);

}  // namespace fovea
