// SPDX-License-Identifier: Apache-2.0
// Divides a memory budget among the pools of a model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "fovea/kv_cache.h"

namespace fovea {

// The cache of one layer group: pages or state. A window pool has kv->window > 0.
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
  bool shrink_context = false;  // max_context may be reduced to fit the budget
  bool prefix_cache = false;    // reserves space for what outlives its request
  // Drafts of a request in one pass. Each needs a state, unless states keep drafts.
  int32_t max_drafts = 0;
  size_t budget = 0;  // in bytes
};

struct MemoryPlan {
  int64_t pages = 0;  // pages of the page allocator and of every full pool, page 0 included
  std::vector<int64_t> window_pages;  // per group, page 0 included; 0 if not a window pool
  int32_t state_slots = 0;            // slot 0 included; 0 without linear layers
  int32_t max_context = 0;
  size_t bytes = 0;  // total of all pools, at most the budget
};

// Returns the slots of such states, slot 0 included, for so many running requests with up to
// max_drafts drafts each, and the snapshots of so many finished ones.
int32_t state_slots(const StateCacheSpec& state, int32_t running, int32_t max_drafts,
                    int32_t cached);

// One request of max_context tokens always fits alone. The remaining memory serves more concurrent
// requests first, then a larger prefix cache. Memory that could never be used is not part of the
// plan. Throws Error{out_of_memory} naming required and available bytes.
MemoryPlan plan_memory(const MemoryDemand& demand);

}  // namespace fovea
