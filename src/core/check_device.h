// SPDX-License-Identifier: Apache-2.0
// Checks of a Device that a caller gives.
#pragma once

#include <string_view>

#include "core/check.h"
#include "fovea/device.h"

namespace fovea {

// Throws Error{invalid_argument} where it is neither the CPU, whose index is 0, nor a GPU. Whether
// there is such a GPU, only its driver knows.
inline void check_device(Device device, std::string_view name) {
  check_argument(device.kind == DeviceKind::cpu || device.kind == DeviceKind::cuda,
                 "{} has kind DeviceKind({}), accepted: cpu, cuda", name,
                 static_cast<int>(device.kind));
  check_argument(device.index >= 0, "{} has index {}, must not be negative", name, device.index);
  check_argument(device.kind != DeviceKind::cpu || device.index == 0,
                 "{} is the CPU with index {}, must be 0: there is one CPU", name, device.index);
}

}  // namespace fovea
