// SPDX-License-Identifier: Apache-2.0
// Moves what a pass has stored of accepted drafts to the places of the tokens that they become.
// Drafts of a tree are stored one after the other, whichever path is accepted.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/cache_set.h"
#include "fovea/speculation.h"
#include "fovea/thread_pool.h"
#include "gpu/gpu.h"
#include "model/model.h"

namespace fovea {

class DraftRows {
 public:
  // `caches` are those of `model`; both and `threads` must outlive the object. `features`, if not
  // null, has [slots, width] values of f32, which move with the rows of the caches.
  DraftRows(const SpeculationLimits& limits, CacheSet& caches, Model& model, float* features,
            ThreadPool& threads);

  // Notes the accepted drafts of a request, by their nodes but for node 0, in a pass that has
  // stored node n as token begin + n.
  void add(const CacheLease& lease, int32_t begin, std::span<const int32_t> nodes);
  // Moves all that add() noted since the last call: nodes[i] becomes token begin + 1 + i. On a GPU
  // the move is enqueued.
  void move();

 private:
  SpeculationLimits limits_;
  CacheSet& caches_;
  ModelDevice& device_;
  std::unique_ptr<KvPool> features_;
  std::unique_ptr<Speculation> speculation_;
  std::vector<int64_t> slots_;           // [requests, width]
  std::vector<int32_t> counts_, nodes_;  // [requests], [requests, width]
  gpu::DeviceBuffer on_device_;          // the same arrays, on a GPU
};

}  // namespace fovea
