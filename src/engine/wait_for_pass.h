// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "gpu/gpu.h"
#include "model/device.h"

namespace fovea {

// Waits until the event at the end of a pass is reached. Among ranks, others may have failed, and
// the pass may wait for them forever: then this throws Error{device_failure} with the reason,
// within ModelDevice::rank_timeout(), after it has ended what waits on this rank.
void wait_for_pass(ModelDevice& device, const gpu::Event& end);

}  // namespace fovea
