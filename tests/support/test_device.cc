// SPDX-License-Identifier: Apache-2.0
#include "support/test_device.h"

#include <cstdlib>

#include "fovea/gpu.h"
#include "gpu/gpu.h"

namespace fovea::test {
namespace {

std::string device_wish() {
  const char* text = std::getenv("FOVEA_TEST_DEVICE");
  return text != nullptr ? text : "cpu";
}

}  // namespace

bool on_gpu() {
  static const bool gpu = device_wish() != "cpu";
  return gpu;
}

std::string why_no_test_device() { return on_gpu() ? why_no_gpu() : ""; }

DeviceInfo test_device() {
  static const DeviceInfo device = find_device(device_wish());
  // Created once and never freed, because creating a context is slow.
  static const gpu::Context* const held = on_gpu() ? new gpu::Context(device.index) : nullptr;
  if (held != nullptr) held->bind();
  return device;
}

}  // namespace fovea::test
