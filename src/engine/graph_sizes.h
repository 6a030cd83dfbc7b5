// SPDX-License-Identifier: Apache-2.0
// The sizes of captured decode steps: the number of requests and the bound of keys that they are
// planned for.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "core/rounding.h"

namespace fovea {

// Returns the size of the graph that serves `requests` requests, 1 to `max_size`: a power of two up
// to 8, then a multiple of 8, at most max_size.
inline int32_t graph_size(int32_t requests, int32_t max_size) {
  const auto count = static_cast<uint32_t>(requests);
  const uint32_t size = count <= 8 ? std::bit_ceil(count) : round_up(count, uint32_t{8});
  return std::min(static_cast<int32_t>(size), max_size);
}

// Returns all sizes in ascending order.
inline std::vector<int32_t> graph_sizes(int32_t max_size) {
  std::vector<int32_t> sizes;
  while (sizes.empty() || sizes.back() < max_size) {
    sizes.push_back(graph_size(sizes.empty() ? 1 : sizes.back() + 1, max_size));
  }
  return sizes;
}

// Backends have faster kernels for a small number of requests with a small number of keys, and
// select them by BatchHints::max_kv_len.
inline constexpr int32_t kShortContexts[] = {2048, 4096};
inline constexpr int32_t kMaxShortRequests = 8;

// Returns the bound of keys of the graph that serves `requests` requests (a graph_size()) of up to
// kv_len keys, 1 to `longest`.
inline int32_t graph_context(int32_t requests, int32_t kv_len, int32_t longest) {
  if (requests > kMaxShortRequests) return longest;
  for (const int32_t context : kShortContexts) {
    if (kv_len <= context && context < longest) return context;
  }
  return longest;
}

// Returns all bounds in ascending order.
inline std::vector<int32_t> graph_contexts(int32_t requests, int32_t longest) {
  std::vector<int32_t> contexts;
  while (contexts.empty() || contexts.back() < longest) {
    contexts.push_back(
        graph_context(requests, contexts.empty() ? 1 : contexts.back() + 1, longest));
  }
  return contexts;
}

}  // namespace fovea
