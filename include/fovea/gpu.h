// SPDX-License-Identifier: Apache-2.0
// Which NVIDIA GPUs there are. The driver is found at run time; without one the library works on
// the CPU.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "fovea/device.h"

namespace fovea {

// Every device the driver shows; empty where why_no_gpu() is not.
std::vector<DeviceInfo> gpu_devices();

// Why there is no GPU to use: no driver, one that is too old, or no device. Empty: there is one.
std::string why_no_gpu();

// The device named "cpu", "cuda" (the first GPU) or "cuda:N". Error{invalid_argument} for another
// name or a GPU that is not there, Error{unsupported} with why_no_gpu().
DeviceInfo find_device(std::string_view name);

}  // namespace fovea
