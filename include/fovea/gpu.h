// SPDX-License-Identifier: Apache-2.0
// Finds NVIDIA GPUs. The driver is loaded at run time; without one the library works on the CPU.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "fovea/api.h"
#include "fovea/device.h"

namespace FOVEA_API fovea {

// Returns every device that the driver lists; empty if why_no_gpu() gives a reason.
std::vector<DeviceInfo> gpu_devices();

// Returns why no GPU can be used: no driver, a driver that is too old, or no device. Empty: there
// is one.
std::string why_no_gpu();

// Returns the device named "cpu", "cuda" (the first GPU) or "cuda:N". Throws
// Error{invalid_argument} for another name or a GPU that does not exist, Error{unsupported} with
// the text of why_no_gpu().
DeviceInfo find_device(std::string_view name);

}  // namespace fovea
