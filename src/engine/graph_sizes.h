// SPDX-License-Identifier: Apache-2.0
// How many requests a captured decode step has room for.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "core/rounding.h"

namespace fovea {

// The size whose graph serves that many requests, 1 to `most`: a power of two up to 8, then a
// multiple of 8, but no more than `most`.
inline int32_t graph_size(int32_t requests, int32_t most) {
  const auto count = static_cast<uint32_t>(requests);
  const uint32_t size = count <= 8 ? std::bit_ceil(count) : round_up(count, uint32_t{8});
  return std::min(static_cast<int32_t>(size), most);
}

// All sizes, ascending.
inline std::vector<int32_t> graph_sizes(int32_t most) {
  std::vector<int32_t> sizes;
  while (sizes.empty() || sizes.back() < most) {
    sizes.push_back(graph_size(sizes.empty() ? 1 : sizes.back() + 1, most));
  }
  return sizes;
}

}  // namespace fovea
