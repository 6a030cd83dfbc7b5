// SPDX-License-Identifier: Apache-2.0
// Routed experts on the CPU.
#pragma once

#include <memory>
#include <vector>

#include "model/device.h"

namespace fovea {

// The device must outlive the result.
std::unique_ptr<Experts> make_host_experts(std::vector<MlpParts> experts, bool weights_scale_input,
                                           ModelDevice& device);

}  // namespace fovea
