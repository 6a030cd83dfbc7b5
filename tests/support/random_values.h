// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace fovea::test {

// Returns uniform values in [low, high) that depend on the seed alone.
inline std::vector<float> random_values(size_t count, uint32_t seed, float low = -2,
                                        float high = 2) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> uniform(low, high);
  std::vector<float> values(count);
  for (float& value : values) value = uniform(generator);
  return values;
}

}  // namespace fovea::test
