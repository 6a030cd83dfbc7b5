// SPDX-License-Identifier: Apache-2.0
// Results of gpu_suite.h as Markdown, CSV and JSON.
#pragma once

#include <string>

#include "bench/gpu_ceilings.h"
#include "fovea/device.h"

namespace fovea::bench {

std::string ceilings_markdown(const DeviceInfo& device, PowerState state,
                              const GpuCeilings& ceilings);

}  // namespace fovea::bench
