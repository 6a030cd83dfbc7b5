// SPDX-License-Identifier: Apache-2.0
// What an engine consists of, decided before anything is allocated.
#pragma once

#include <string>
#include <vector>

#include "engine/cache_set.h"
#include "engine/group_backends.h"
#include "engine/scheduler.h"
#include "fovea/engine.h"
#include "model/model.h"

namespace fovea {

// Error{invalid_argument} names the option, its value and the limit.
void check_engine_options(const EngineOptions& options);

// The model's weights on `device`, read or made by `threads`, which outlives the model.
std::unique_ptr<Model> load_model_of(const EngineOptions& options,
                                     std::shared_ptr<ModelDevice> device, ThreadPool& threads);

// Everything of an engine that follows from its options, its model and its device.
struct SizedEngine {
  CacheSetOptions caches;
  BatchLimits limits;
  std::vector<GroupSelection> selections;
  SchedulerLimits scheduling;
  int32_t wanted_context = 0;
  bool cuda_graphs = false;
  // Rows of a pass whose logits somebody may need.
  int32_t logit_rows() const { return scheduling.max_running + scheduling.max_prompt_rows; }
};
// options.registry is given. free_bytes: of the device, half of which are for caches where
// options.kv_memory_bytes is 0.
SizedEngine size_engine(const EngineOptions& options, const ModelInfo& model,
                        const DeviceInfo& device, size_t free_bytes);

// Free memory of a device that is here.
size_t free_memory(Device device);

// On the CPU: the logits of a pass, and what tokens are drawn with.
size_t host_logit_bytes(const SchedulerLimits& limits, int32_t vocabulary, int threads);

}  // namespace fovea
