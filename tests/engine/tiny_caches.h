// SPDX-License-Identifier: Apache-2.0
// Cache sets that are small enough to become full.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "engine/cache_set.h"

namespace fovea {

struct TinyCaches {
  int32_t page_size = 4;
  int64_t pages = 20;        // excluding page 0
  int64_t window_pages = 0;  // excluding page 0; 0: no window group
  int32_t window = 6;
  int32_t state_slots = 0;  // excluding slot 0; 0: no linear group
  int32_t kept_drafts = 0;  // that a state slot keeps
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
    state.layers = state.conv_dim = state.heads = state.rows = 2;
    state.columns = 1;
    state.conv_width = 3;
    state.max_drafts = tiny.kept_drafts;
    state.draft_inputs = tiny.kept_drafts > 0 ? 4 : 0;
    options.groups.push_back({{}, state});
    options.plan.window_pages.push_back(0);
    options.plan.state_slots = tiny.state_slots + 1;
  }
  return options;
}

// All values of a state slot: recurrent states and convolution windows of every layer.
template <typename Body>
void for_state_values(StatePool& pool, int32_t slot, const Body& body) {
  for (int32_t index = 0; index < pool.spec().layers; ++index) {
    const StateLayerView layer = pool.layer(index);
    const auto visit = [&](float* values, int64_t stride) {
      for (int64_t i = 0; i < stride; ++i) body(values[slot * stride + i]);
    };
    visit(layer.state_as<float>(), layer.state_slot_stride);
    visit(layer.conv, layer.conv_slot_stride);
  }
}

inline void set_state(StatePool& pool, int32_t slot, float value) {
  for_state_values(pool, slot, [&](float& at) { at = value; });
}

// Returns the value that set_state() stored; nullopt if the values differ.
inline std::optional<float> state_value(StatePool& pool, int32_t slot) {
  std::optional<float> value;
  bool same = true;
  for_state_values(pool, slot, [&](float& at) {
    same = same && value.value_or(at) == at;
    value = at;
  });
  return same ? value : std::nullopt;
}

}  // namespace fovea
