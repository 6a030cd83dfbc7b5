// SPDX-License-Identifier: Apache-2.0
// The host's clock, and the median of what was timed.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

namespace fovea::bench {

// Seconds since some moment in the past.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Of one value at least; of an even number the upper one.
inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace fovea::bench
