// SPDX-License-Identifier: Apache-2.0
// Which requests of a pass begin in the same slots, because the prefix cache made their pages one.
// Backends read those once for all of them (BatchView::shared_prefix).
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

// The first slots of pages 0, 1, 3, 7, ... of a request. Requests ordered by them stand beside
// those that they share most of these pages with.
using PageLandmarks = std::array<int32_t, 16>;
PageLandmarks page_landmarks(std::span<const int32_t> slots, int32_t page_size);

class SharedPrefixes {
 public:
  // For layer groups that were selected for batches within the limits.
  SharedPrefixes(const std::vector<GroupSelection>& selections, const BatchLimits& limits);

  // Whether a pass of so many requests of up to kv_len tokens may name its shared prefixes.
  bool possible(int32_t requests, int32_t kv_len) const {
    return least_saved_ > 0 && int64_t{requests - 1} * kv_len >= least_saved_;
  }

  // Fills shared[i] with the tokens that part i has in the slots of part i - 1. False, and nothing
  // is said of `shared`: no level of them can save BatchLimits::min_prefix_savings, or the pass has
  // too many new tokens for groups.
  bool find(std::span<const PassPart> parts, const RequestTable& table,
            std::span<int32_t> shared) const;

 private:
  int32_t page_size_ = 1;
  int32_t most_tokens_ = 0;  // of a pass that shares
  int64_t least_saved_ = 0;  // keys; 0: no layers look at shared prefixes
};

}  // namespace fovea
