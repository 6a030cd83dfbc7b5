// SPDX-License-Identifier: Apache-2.0
// The second model of "draft:FOLDER", or the head of "eagle:FOLDER": how it is loaded and sized.
#pragma once

#include <cstddef>
#include <memory>

#include "engine/plan_engine.h"
#include "fovea/engine.h"
#include "fovea/thread_pool.h"
#include "model/eagle_head.h"
#include "model/model.h"

namespace fovea {

// A draft model, and the options of an engine for it alone: those of the engine that it drafts for,
// but for the folder, its part of the KV budget, and backends that are chosen for it.
struct DraftModel {
  std::unique_ptr<Model> model;
  EngineOptions options;
  EagleHead* head = nullptr;  // `model`, if it reads features of the model that it drafts for
};

// Returns true if EngineOptions::speculate is "draft:FOLDER" or "eagle:FOLDER".
bool has_draft_model(const EngineOptions& options);

// Loads the model of "draft:FOLDER", or the head of "eagle:FOLDER" for `model`, on a device;
// `model` must outlive it, and gets the tap of a head, still without rows. Throws
// Error{unsupported} if the draft model has recurrent states, which cannot forget rejected drafts,
// and as load_eagle_head().
DraftModel load_draft_model(const EngineOptions& options, std::shared_ptr<ModelDevice> device,
                            ThreadPool& threads, Model& model);

// Divides the KV budget so that the caches of both models, and the features of a head, hold as many
// tokens. Without kv_memory_bytes the budget is half of free_bytes. Throws Error{invalid_argument}
// if the vocabularies differ.
void divide_budget(const ModelInfo& model, size_t free_bytes, EngineOptions& options,
                   DraftModel& draft);

// Returns the sizes of the draft model's runner and caches, once its budget is divided.
SizedEngine size_draft_model(const DraftModel& draft, const DeviceInfo& device);

// Returns the bytes that it takes with everything around it, but for graphs, next to a model whose
// caches have so many slots.
size_t draft_bytes(const DraftModel& draft, const SizedEngine& sized, int64_t slots, int threads);

// Allocates the features of that model, if a head reads them, and returns them, [slots, hidden], or
// null. Call it before passes of either.
float* connect_head(const DraftModel& draft, int64_t slots, Model& model);

}  // namespace fovea
