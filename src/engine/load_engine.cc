// SPDX-License-Identifier: Apache-2.0
// Engine::load checks, sizes and selects everything before it allocates anything but weights.
#include "engine/load_engine.h"

#include <filesystem>
#include <new>
#include <utility>

#include "core/check.h"
#include "core/quote.h"
#include "engine/model_drafter.h"
#include "engine/plan_engine.h"
#include "engine/text_engine.h"
#include "fovea/gpu.h"
#include "model/cuda_device.h"

namespace fovea {
namespace {

std::vector<std::string> load_notes(const EngineOptions& options, const ModelInfo& model) {
  std::vector<std::string> notes;
  if (!model.note.empty()) notes.push_back(model.note);
  if (options.max_context > 0 || model.default_context == model.max_context) return notes;
  notes.push_back(
      model.default_context == kLongestContext
          ? fmt::format("contexts are served up to {} tokens; the model was made for {}",
                        model.default_context, model.max_context)
          : fmt::format("contexts are served up to {} tokens, as longer ones (max_context, up to "
                        "{}) change the positions of all requests",
                        model.default_context, model.max_context));
  return notes;
}

std::shared_ptr<ModelDevice> make_model_device(const EngineOptions& options,
                                               const DeviceInfo& device, ThreadPool& threads,
                                               const ModelRanks& ranks,
                                               std::shared_ptr<ModelDevice> stream_of = {}) {
  if (device.kind == DeviceKind::cpu) return make_host_device(threads, ranks);
  return make_cuda_device({.index = device.index,
                           .max_rows = options.max_batch_tokens,
                           .row_invariant = options.batch_invariant,
                           .ranks = ranks,
                           .stream_of = std::move(stream_of)});
}

// Returns the free bytes of the rank that has the fewest, because all need the same caches.
size_t free_bytes_of_all(size_t own, const ModelRanks& ranks) {
  if (ranks.host == nullptr) return own;
  int64_t value = -static_cast<int64_t>(own);
  ranks.host->all_reduce(&value, &value, 1, DType::i64, ReduceOp::max);
  return static_cast<size_t>(-value);
}

// Requests of token ids need no tokenizer, so an unreadable one is not an error yet.
void load_tokenizer(const std::string& folder, EngineParts& parts) {
  try {
    parts.tokenizer = Tokenizer::load(folder);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::out_of_memory) throw;
    parts.why_no_tokenizer = error;
    parts.notes.push_back(
        fmt::format("requests and results are token ids without text: {}", error.what()));
  }
}

void add_drafter(const EngineOptions& options, DeviceInfo device, std::optional<DraftModel> draft,
                 bool host_draws, EngineParts& parts) {
  if (options.speculate == "ngram") parts.drafter = make_ngram_drafter();
  if (const std::optional<double> length = oracle_length(options)) {
    parts.drafter =
        make_oracle_drafter(*length, options.max_drafts, parts.request_limits.vocabulary);
  }
  if (!draft) return;
  if (device.kind == DeviceKind::cpu) device.cores = parts.threads->size();
  SizedEngine sized = size_draft_model(*draft, device);
  parts.drafter_bytes = draft_bytes(*draft, sized, parts.caches->slots(), parts.threads->size());
  parts.drafter = make_model_drafter(*draft, std::move(sized), *parts.threads, *parts.caches,
                                     host_draws, parts.runner->drawn_lists());
  parts.draft_model = std::move(draft->model);
}

std::unique_ptr<Engine> load_checked(const EngineOptions& given, const ModelRanks& ranks,
                                     bool host_draws) {
  EngineOptions options = given;
  std::unique_ptr<BackendRegistry> own_registry;
  if (options.registry == nullptr) {
    own_registry = std::make_unique<BackendRegistry>(BackendRegistry::builtin());
    options.registry = own_registry.get();
  }
  auto threads = std::make_unique<ThreadPool>(options.threads);
  const DeviceInfo device = find_device(options.device);
  const std::shared_ptr<ModelDevice> model_device =
      make_model_device(options, device, *threads, ranks);
  std::unique_ptr<Model> model = load_model_of(options, model_device, *threads);
  // Each of several ranks has the whole draft model. Its passes and those of the model are enqueued
  // on one stream, because they read each other's results.
  std::optional<DraftModel> draft;
  if (has_draft_model(options)) {
    draft = load_draft_model(
        options, make_model_device(options, device, *threads, {}, model_device), *threads, *model);
  }

  const ModelInfo& info = model->info();
  const size_t free_bytes =
      options.kv_memory_bytes > 0 ? 0 : free_bytes_of_all(free_memory(device.device()), ranks);
  if (draft) divide_budget(info, free_bytes, options, *draft);
  SizedEngine sized = size_engine(options, info, device, free_bytes);
  const int32_t logit_rows = sized.logit_rows();

  EngineParts parts{std::move(own_registry),
                    std::move(threads),
                    std::move(model),
                    std::nullopt,
                    std::nullopt,
                    ChatTemplate::open(options.model_path)};
  parts.selections = std::move(sized.selections);
  parts.request_limits = {info.vocabulary, sized.limits.max_kv_len, sized.wanted_context};
  parts.limits = sized.scheduling;
  parts.overlap = options.overlap.value_or(false);
  parts.record_steps = options.record_steps;
  parts.always_speculate = options.always_speculate;
  parts.draft_branches = options.draft_branches;
  parts.notes = load_notes(given, info);
  load_tokenizer(options.model_path, parts);
  // Excludes the tables of positions, which are added later.
  parts.weight_bytes = parts.model->weight_bytes();
  parts.cache_bytes = sized.caches.plan.bytes;
  parts.caches = std::make_unique<CacheSet>(std::move(sized.caches));
  float* features = nullptr;
  if (draft) features = connect_head(*draft, parts.caches->slots(), *parts.model);
  if (options.draft_branches > 1) {
    parts.draft_rows = std::make_unique<DraftRows>(
        SpeculationLimits{sized.limits.max_requests, 1 + options.max_drafts}, *parts.caches,
        *parts.model, features, *parts.threads);
  }
  parts.runner = make_model_runner(*parts.model, *parts.caches, *parts.threads, parts.selections,
                                   {.limits = sized.limits,
                                    .max_graph_requests = options.max_graph_requests,
                                    .cuda_graphs = sized.cuda_graphs,
                                    .logit_rows = logit_rows,
                                    .host_draws = parts.overlap || host_draws,
                                    .max_width = sized.max_width,
                                    .captures_extends = sized.captures_extends,
                                    .masked_draws = sized.masked_draws,
                                    .trees = options.draft_branches > 1,
                                    .drawn_lists = sized.drawn_lists});
  add_drafter(options, device, std::move(draft), host_draws, parts);
  return std::make_unique<TextEngine>(std::move(parts));
}

}  // namespace

std::unique_ptr<Engine> Engine::load(const EngineOptions& options) { return load_engine(options); }

std::unique_ptr<Engine> load_engine(const EngineOptions& options, const ModelRanks& ranks,
                                    bool host_draws) {
  check_engine_options(options);
  try {
    return load_checked(options, ranks, host_draws);
  } catch (const std::bad_alloc&) {
    fail(ErrorCode::out_of_memory, "out of memory while loading {}", printable(options.model_path));
  }
}

}  // namespace fovea
