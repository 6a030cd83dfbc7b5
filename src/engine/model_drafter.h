// SPDX-License-Identifier: Apache-2.0
// Drafts of a second, smaller model, which has caches of its own.
#pragma once

#include <cstddef>
#include <memory>

#include "engine/drafter.h"
#include "engine/plan_engine.h"
#include "fovea/engine.h"
#include "fovea/thread_pool.h"
#include "model/model.h"

namespace fovea {

// A draft model, and the options of an engine for it alone: those of the engine that it drafts for,
// but for the folder, its part of the KV budget, and backends that are chosen for it.
struct DraftModel {
  std::unique_ptr<Model> model;
  EngineOptions options;
};

// Returns true if EngineOptions::speculate is "draft:FOLDER".
bool has_draft_model(const EngineOptions& options);

// Loads the model of "draft:FOLDER" on a device. Throws Error{unsupported} if it has recurrent
// states, which cannot forget rejected drafts.
DraftModel load_draft_model(const EngineOptions& options, std::shared_ptr<ModelDevice> device,
                            ThreadPool& threads);

// Divides the KV budget so that the caches of both models hold as many tokens. Without
// kv_memory_bytes the budget is half of free_bytes. Throws Error{invalid_argument} if the
// vocabularies differ.
void divide_budget(const ModelInfo& model, size_t free_bytes, EngineOptions& options,
                   DraftModel& draft);

// Returns the sizes of the draft model's runner and caches, once its budget is divided.
SizedEngine size_draft_model(const DraftModel& draft, const DeviceInfo& device);

// Makes a drafter whose guesses are drawn from the model by each request's own rules, seed and
// positions. Where the runner draws tokens (on a GPU, and with host_draws), a pass is enqueued
// before the token of the one before is known. A request that does not fit the caches or the
// context gets no drafts. The model, `threads` and the registry of the options must outlive it.
std::unique_ptr<Drafter> make_model_drafter(const DraftModel& draft, SizedEngine sized,
                                            ThreadPool& threads, bool host_draws = false);

}  // namespace fovea
