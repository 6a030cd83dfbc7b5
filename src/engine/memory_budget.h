// SPDX-License-Identifier: Apache-2.0
// Divides one budget among the pools of a model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "fovea/kv_cache.h"

namespace fovea {

// The cache of one layer group: pages or state. kv->window > 0: a window pool.
struct CacheGroup {
  std::optional<KvCacheSpec> kv;
  std::optional<StateCacheSpec> state;
};

struct MemoryDemand {
  std::vector<CacheGroup> groups;
  int32_t page_size = 16;
  int32_t max_requests = 1;
  int32_t max_batch_tokens = 1;
  int32_t max_context = 1;
  bool shrink_context = false;  // max_context is a wish
  bool prefix_cache = false;    // keep room for what outlives its request
  size_t budget = 0;            // bytes
};

struct MemoryPlan {
  int64_t pages = 0;  // of the page allocator and of every full pool, page 0 included
  std::vector<int64_t> window_pages;  // per group, page 0 included; 0: not a window pool
  int32_t state_slots = 0;            // slot 0 included; 0: no linear layers
  int32_t max_context = 0;
  size_t bytes = 0;  // of all pools together, at most the budget
};

// One request of max_context tokens always fits alone. What is left makes room for more requests at
// once, then for a larger prefix cache; memory that could never be used is not taken. Throws
// Error{out_of_memory} naming need and have.
MemoryPlan plan_memory(const MemoryDemand& demand);

}  // namespace fovea
