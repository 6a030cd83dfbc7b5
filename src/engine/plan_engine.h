// SPDX-License-Identifier: Apache-2.0
// The composition of an engine, decided before anything is allocated.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/cache_set.h"
#include "engine/graph_sizes.h"
#include "engine/group_backends.h"
#include "engine/scheduler.h"
#include "fovea/engine.h"
#include "model/model.h"

namespace fovea {

// Begins EngineOptions::speculate before the folder of a draft model.
inline constexpr std::string_view kDraftPrefix = "draft:";
// Begins it before the folder of a head on the model.
inline constexpr std::string_view kEaglePrefix = "eagle:";
// Begins it before the mean number of tokens of a step.
inline constexpr std::string_view kOraclePrefix = "oracle:";

// Returns LENGTH of "oracle:LENGTH", or nothing if the options ask for no oracle. Throws
// Error{invalid_argument} if it is not a number in [1, max_drafts + 1].
std::optional<double> oracle_length(const EngineOptions& options);

// Does what Engine::plan() does for the model's part of the communicator's rank, which never
// communicates. If ranks share contexts, options.page_size counts the tokens of a page on all.
EnginePlan plan_rank(const EngineOptions& options, const std::optional<DeviceInfo>& device,
                     const ModelRanks& ranks);

// Throws Error{invalid_argument} naming the option, its value and the limit.
void check_engine_options(const EngineOptions& options);

// Reads or generates the model's weights on `device` with `threads`, which must outlive the model.
std::unique_ptr<Model> load_model_of(const EngineOptions& options,
                                     std::shared_ptr<ModelDevice> device, ThreadPool& threads);

// Everything about an engine that follows from its options, its model and its device.
struct SizedEngine {
  CacheSetOptions caches;
  BatchLimits limits;
  std::vector<GroupSelection> selections;
  SchedulerLimits scheduling;
  int32_t wanted_context = 0;
  bool cuda_graphs = false;
  bool captures_extends = false;  // ModelRunnerOptions::captures_extends
  int32_t max_width = 1;          // ModelRunnerOptions::max_width
  bool masked_draws = true;       // ModelRunnerOptions::masked_draws
  int32_t likeliest = 0;          // ModelRunnerOptions::likeliest
  int32_t drawn_lists = 1;        // likewise
  // Returns the rows of logits that a GPU has room for. A pass with drafts can need more and
  // computes them in several steps.
  int32_t logit_rows() const {
    return scheduling.max_running + scheduling.max_prompt_rows +
           verify_rows(scheduling.max_running, max_width);
  }
};
// Requires options.registry. If options.kv_memory_bytes is 0, caches get half of free_bytes, the
// free memory of the device.
SizedEngine size_engine(const EngineOptions& options, const ModelInfo& model,
                        const DeviceInfo& device, size_t free_bytes);

// Returns the bytes that a model of these sizes takes on a device, but for graphs.
EngineMemory planned_memory(const Model& model, const SizedEngine& sized, int threads);

// Returns the free memory of a device that exists.
size_t free_memory(Device device);

// Returns the bytes of a pass's logits and of the sampler's scratch on the CPU.
size_t host_logit_bytes(const SchedulerLimits& limits, int32_t vocabulary, int threads);

}  // namespace fovea
