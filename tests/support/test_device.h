// SPDX-License-Identifier: Apache-2.0
// The device of the contract tests: FOVEA_TEST_DEVICE, "cpu" (default) or "cuda".
#pragma once

#include <string>

#include "fovea/device.h"

namespace fovea::test {

bool on_gpu();
// Returns why the tests must be skipped; empty: the device is there.
std::string why_no_test_device();
// Returns the device of every request, if why_no_test_device() is empty.
DeviceInfo test_device();

}  // namespace fovea::test
