// SPDX-License-Identifier: Apache-2.0
// A model with its backends, as every runner uses them.
#pragma once

#include <memory>
#include <vector>

#include "engine/cache_set.h"
#include "engine/group_backends.h"
#include "fovea/engine.h"
#include "model/model.h"

namespace fovea {

// The model and the backends of all groups, reserved for batches within the limits.
class ReservedModel {
 public:
  ReservedModel(Model& model, CacheSet& caches, ThreadPool& threads,
                const std::vector<GroupSelection>& selections, const BatchLimits& limits);

  // Plans the batch and runs the model up to its last hidden states; logits are separate.
  void forward(const BatchView& batch, const ModelInputs& inputs);
  // Bytes for activations, attention and products.
  const EngineMemory& memory() const { return memory_; }
  Model& model() const { return model_; }

 private:
  Model& model_;
  std::vector<std::unique_ptr<AttentionBackend>> backends_;
  std::vector<AttentionBackend*> backend_pointers_;
  EngineMemory memory_;
};

}  // namespace fovea
