// SPDX-License-Identifier: Apache-2.0
// How many requests a captured decode step has room for, and for keys up to which bound it is
// planned.
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

// Backends have other kernels for few requests of few keys: 1 x 1k of 32/8 heads takes 4.9 us where
// BatchView::max_kv_len shows it, 6.4 where it does not, 4 x 1k 7.4 and 8.9 (H200, 2026-11-23).
inline constexpr int32_t kShortContexts[] = {2048, 4096};
inline constexpr int32_t kMostShortRequests = 8;

// The bound of keys whose graph serves `requests` requests (a graph_size()) of up to kv_len keys, 1
// to `longest`.
inline int32_t graph_context(int32_t requests, int32_t kv_len, int32_t longest) {
  if (requests > kMostShortRequests) return longest;
  for (const int32_t context : kShortContexts) {
    if (kv_len <= context && context < longest) return context;
  }
  return longest;
}

// All of them, ascending.
inline std::vector<int32_t> graph_contexts(int32_t requests, int32_t longest) {
  std::vector<int32_t> contexts;
  while (contexts.empty() || contexts.back() < longest) {
    contexts.push_back(
        graph_context(requests, contexts.empty() ? 1 : contexts.back() + 1, longest));
  }
  return contexts;
}

}  // namespace fovea
