// SPDX-License-Identifier: Apache-2.0
// Checks of a Device given by the caller.
#pragma once

#include <string_view>

#include "core/check.h"
#include "fovea/device.h"

namespace fovea {

// Throws Error{invalid_argument} unless the device is the CPU, whose index is 0, or a GPU. Only the
// driver knows which GPUs exist.
inline void check_device(Device device, std::string_view name) {
  check_argument(device.kind == DeviceKind::cpu || device.kind == DeviceKind::cuda,
                 "{} has kind DeviceKind({}), accepted: cpu, cuda", name,
                 static_cast<int>(device.kind));
  check_argument(device.index >= 0, "{} has index {}, must not be negative", name, device.index);
  check_argument(device.kind != DeviceKind::cpu || device.index == 0,
                 "{} is the CPU with index {}, must be 0: there is one CPU", name, device.index);
}

}  // namespace fovea
