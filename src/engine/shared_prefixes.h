// SPDX-License-Identifier: Apache-2.0
// Finds requests of a pass that begin in the same slots because the prefix cache gave them the same
// pages. Backends read those keys once for all of them (BatchHints::shared_prefix).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/model_runner.h"
#include "fovea/batch.h"
#include "fovea/engine.h"
#include "fovea/kv_cache.h"

namespace fovea {

// The first slots of pages 0, 1, 3, 7, ... of a request. Sorting by them makes requests that share
// many of these pages neighbours.
using PageLandmarks = std::array<int32_t, 16>;
PageLandmarks page_landmarks(std::span<const int32_t> slots, int32_t page_size);

class SharedPrefixes {
 public:
  // The selections are for batches within the limits.
  SharedPrefixes(const std::vector<GroupSelection>& selections, const BatchLimits& limits);

  // Returns true if a pass of that many requests of up to kv_len tokens may name shared prefixes.
  bool possible(int32_t requests, int32_t kv_len) const {
    return min_saved_ > 0 && int64_t{requests - 1} * kv_len >= min_saved_;
  }

  // Sets shared[i] to the number of leading tokens for which parts i and i - 1 have the same slots.
  // Returns false, with unspecified `shared`, if no level can save BatchLimits::min_prefix_savings
  // or if the pass has too many new tokens for groups.
  bool find(std::span<const PassPart> parts, const RequestTable& table,
            std::span<int32_t> shared) const;

 private:
  int32_t page_size_ = 1;
  int32_t max_tokens_ = 0;  // max new tokens of a pass that shares prefixes
  int64_t min_saved_ = 0;   // min keys to save; 0 if no layers can share prefixes
};

}  // namespace fovea
