// SPDX-License-Identifier: Apache-2.0
// Cache sets that are small enough to become full.
#pragma once

#include <cstdint>

#include "engine/cache_set.h"

namespace fovea {

struct TinyCaches {
  int32_t page_size = 4;
  int64_t pages = 20;        // excluding page 0
  int64_t window_pages = 0;  // excluding page 0; 0: no window group
  int32_t window = 6;
  int32_t state_slots = 0;  // excluding slot 0; 0: no linear group
  int32_t max_requests = 4;
  int32_t max_context = 40;
  bool prefix_cache = true;
};

inline CacheSetOptions tiny_cache_options(const TinyCaches& tiny) {
  KvCacheSpec kv;
  kv.layers = kv.kv_heads = kv.head_dim = kv.head_dim_v = 1;
  kv.page_size = tiny.page_size;
  CacheSetOptions options;
  options.page_size = tiny.page_size;
  options.max_requests = tiny.max_requests;
  options.prefix_cache = tiny.prefix_cache;
  options.plan.pages = tiny.pages + 1;
  options.plan.max_context = tiny.max_context;
  options.groups.push_back({kv, {}});
  options.plan.window_pages.push_back(0);
  if (tiny.window_pages > 0) {
    kv.window = tiny.window;
    options.groups.push_back({kv, {}});
    options.plan.window_pages.push_back(tiny.window_pages + 1);
  }
  if (tiny.state_slots > 0) {
    StateCacheSpec state;
    state.layers = state.conv_dim = state.heads = state.rows = state.columns = 1;
    state.conv_width = 2;
    options.groups.push_back({{}, state});
    options.plan.window_pages.push_back(0);
    options.plan.state_slots = tiny.state_slots + 1;
  }
  return options;
}

}  // namespace fovea
