// SPDX-License-Identifier: Apache-2.0
// Where everything of a pool lies in its one block of memory, in checked 64-bit arithmetic.
#pragma once

#include <cstdint>
#include <string_view>

#include "fovea/kv_cache.h"

namespace fovea {

// Arrays start on a cache line.
inline constexpr int64_t kPoolAlignment = 64;

// The next multiple of kPoolAlignment. Throws Error{invalid_argument} naming `what` where it does
// not fit int64.
int64_t align_up(std::string_view what, int64_t bytes);

// One layer is K, V, scales of K, scales of V, each array aligned; layers follow each other.
struct KvPoolLayout {
  int64_t v_offset = 0;  // bytes from the layer's start; mla: 0
  int64_t k_scale_offset = 0, v_scale_offset = 0;
  int64_t scales = 0;  // floats of each scale array, 0: none
  int64_t layer_bytes = 0;
  int64_t total_bytes = 0;
  KvLayerView view;  // of layer 0 without addresses
};

// Validates spec and pages (>= 1), and computes the layout of that many pages. Throws
// Error{invalid_argument}.
KvPoolLayout kv_pool_layout(const KvCacheSpec& spec, int64_t pages);

// Addresses of one layer in memory that starts at `base`.
KvLayerView kv_layer_view(const KvPoolLayout& layout, char* base, int32_t layer);

}  // namespace fovea
