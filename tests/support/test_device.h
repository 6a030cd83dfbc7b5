// SPDX-License-Identifier: Apache-2.0
// Where the contract tests run: FOVEA_TEST_DEVICE, "cpu" (default) or "cuda".
#pragma once

#include <string>

#include "fovea/device.h"

namespace fovea::test {

bool on_gpu();
// Empty: the device is there; else why the tests must be skipped.
std::string why_no_test_device();
// The device of every request; needs why_no_test_device() to be empty.
DeviceInfo test_device();

}  // namespace fovea::test
