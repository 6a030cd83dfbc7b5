// SPDX-License-Identifier: Apache-2.0
// Copies arrays to the GPU and back, on the null stream.
#pragma once

#include <algorithm>
#include <vector>

#include "gpu/gpu.h"

namespace fovea::test {

template <typename T>
gpu::DeviceBuffer to_device(const std::vector<T>& values) {
  gpu::DeviceBuffer buffer(std::max<size_t>(values.size(), 1) * sizeof(T));
  gpu::copy_to_device(buffer.data(), values.data(), values.size() * sizeof(T), nullptr);
  return buffer;
}

template <typename T>
std::vector<T> to_host(const gpu::DeviceBuffer& buffer, size_t count) {
  std::vector<T> values(count);
  gpu::copy_to_host(values.data(), buffer.data(), count * sizeof(T), nullptr);
  gpu::synchronize(nullptr);
  return values;
}

}  // namespace fovea::test
