// SPDX-License-Identifier: Apache-2.0
// Computes where each array of a pool lies in its block of memory, in checked 64-bit arithmetic.
#pragma once

#include <cstdint>
#include <string_view>

#include "fovea/kv_cache.h"

namespace fovea {

// Arrays start on a cache line.
inline constexpr int64_t kPoolAlignment = 64;

// Returns the next multiple of kPoolAlignment. Throws Error{invalid_argument} naming `what` if it
// does not fit int64.
int64_t align_up(std::string_view what, int64_t bytes);

// A layer consists of K, V, scales of K and scales of V, each aligned. Layers follow each other.
struct KvPoolLayout {
  int64_t v_offset = 0;  // bytes from the layer's start; 0 for mla
  int64_t k_scale_offset = 0, v_scale_offset = 0;
  int64_t scales = 0;  // floats in each scale array; 0 without scales
  int64_t layer_bytes = 0;
  int64_t total_bytes = 0;
  KvLayerView view;  // view of layer 0, without addresses
};

// Validates spec and pages (>= 1) and returns the layout of that many pages. Throws
// Error{invalid_argument}.
KvPoolLayout kv_pool_layout(const KvCacheSpec& spec, int64_t pages);

// Returns the addresses of one layer in memory that starts at `base`.
KvLayerView kv_layer_view(const KvPoolLayout& layout, char* base, int32_t layer);

}  // namespace fovea
