// SPDX-License-Identifier: Apache-2.0
// A device that only counts what a model would place on it, so that any machine can plan for any
// device and size.
#pragma once

#include <memory>

#include "model/device.h"

namespace fovea {

// Checks and counts weights as a real ModelDevice of that kind does, but stores nothing. Pointers
// to weights are not null but must not be dereferenced. Operations and allocations throw
// Error{unsupported}. With ranks it counts the part of the communicator's rank, which may be on any
// device and never communicates.
std::unique_ptr<ModelDevice> make_counting_device(const DeviceInfo& device,
                                                  const ModelRanks& ranks = {});

}  // namespace fovea
