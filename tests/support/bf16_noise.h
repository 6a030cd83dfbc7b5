// SPDX-License-Identifier: Apache-2.0
// Random operands for tests of kernels.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "core/float_types.h"

namespace fovea::test {

// Returns bf16 values in [-1, 1) that depend on the seed alone.
inline std::vector<uint16_t> bf16_noise(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values) {
    value = float_to_bf16(static_cast<float>(random() % 2048) / 1024.0f - 1.0f);
  }
  return values;
}

}  // namespace fovea::test
