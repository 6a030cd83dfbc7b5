// SPDX-License-Identifier: Apache-2.0
// Computes the sizes and selections of an engine; implements Engine::plan.
#include "engine/plan_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <optional>
#include <utility>

#include "attention/prefix_levels.h"
#include "core/check.h"
#include "core/quote.h"
#include "engine/available_memory.h"
#include "engine/cuda_batch.h"
#include "engine/draft_model.h"
#include "engine/model_runner.h"
#include "engine/sampler.h"
#include "engine/shared_prefixes.h"
#include "fovea/gpu.h"
#include "fovea/speculation.h"
#include "gpu/gpu.h"
#include "model/counting_device.h"

namespace fovea {
namespace {

constexpr int32_t kMaxPageSize = 65536;
constexpr int32_t kMaxRequests = 65535;
constexpr int32_t kMaxBatchTokens = 1 << 20;
constexpr int32_t kMaxDrafts = kMaxDraftNodes - 1;
constexpr int32_t kMaxDraftBranches = 8;
// Size of the buffer for logits of scored prompts. A buffer for max_batch_tokens rows would be far
// larger than this: hundreds of MB for a vocabulary of 150,000.
constexpr size_t kPromptLogitBytes = size_t{16} << 20;
// Minimum number of bytes per layer that a shared prefix must save. On a CPU smaller savings are
// not worth the search; on a GPU, prefixes in the L2 cache are cheap to read again.
constexpr int64_t kCpuPrefixSavings = 1'000'000;
constexpr int64_t kGpuPrefixSavings = 512'000'000;

int32_t context_of(const EngineOptions& options, const ModelInfo& model) {
  check_argument(options.max_context <= model.max_context,
                 "max_context is {}, the model was made for {}", options.max_context,
                 model.max_context);
  check_argument(options.max_context <= kLongestContext,
                 "max_context is {}, Fovea serves contexts of up to {}", options.max_context,
                 kLongestContext);
  return options.max_context > 0 ? options.max_context : model.default_context;
}

CacheSetOptions cache_options(const EngineOptions& options, const ModelInfo& model, Device device,
                              size_t free_bytes) {
  CacheSetOptions caches;
  caches.device = device;
  caches.groups = cache_groups(model, options);
  caches.page_size = options.page_size;
  caches.max_requests = std::min(options.max_requests, options.max_batch_tokens);
  caches.prefix_cache = options.prefix_cache;
  caches.model = options.model_path;
  caches.kv_format =
      fmt::format("{}/{}", dtype_name(options.kv_dtype), static_cast<int>(options.kv_scale));
  MemoryDemand demand;
  demand.groups = caches.groups;
  demand.page_size = caches.page_size;
  demand.max_requests = caches.max_requests;
  demand.max_batch_tokens = options.max_batch_tokens;
  demand.max_context = context_of(options, model);
  demand.shrink_context = options.max_context == 0;
  demand.prefix_cache = caches.prefix_cache;
  demand.max_drafts = options.speculate.empty() ? 0 : options.max_drafts;
  demand.budget = options.kv_memory_bytes > 0 ? options.kv_memory_bytes : free_bytes / 2;
  caches.plan = plan_memory(demand);
  return caches;
}

BatchLimits batch_limits(const EngineOptions& options, const CacheSetOptions& caches,
                         const DeviceInfo& device) {
  BatchLimits limits;
  limits.max_requests = caches.max_requests;
  limits.max_tokens = options.max_batch_tokens;
  limits.max_q_len = std::min(options.max_batch_tokens, caches.plan.max_context);
  limits.max_kv_len = caches.plan.max_context;
  limits.workspace_budget = options.workspace_budget;
  if (options.prefix_cache) limits.prefix_levels = options.prefix_levels;
  limits.min_prefix_savings = options.min_prefix_savings.value_or(
      device.kind == DeviceKind::cpu ? kCpuPrefixSavings : kGpuPrefixSavings);
  return limits;
}

void check_speculation(const EngineOptions& options) {
  const bool drafts =
      std::ranges::any_of(std::array{kDraftPrefix, kEaglePrefix}, [&](std::string_view prefix) {
        return options.speculate.starts_with(prefix) && options.speculate.size() > prefix.size();
      });
  const bool oracle = options.speculate.starts_with(kOraclePrefix);
  check_argument(
      options.speculate.empty() || options.speculate == "ngram" || drafts || oracle,
      "speculate is '{}', must be ngram, draft:MODEL, eagle:HEAD, oracle:LENGTH or empty",
      printable(options.speculate));
  check_argument(options.max_drafts >= 1 && options.max_drafts <= kMaxDrafts,
                 "max_drafts is {}, must be in [1, {}]", options.max_drafts, kMaxDrafts);
  check_argument(options.draft_branches >= 1 && options.draft_branches <= kMaxDraftBranches,
                 "draft_branches is {}, must be in [1, {}]", options.draft_branches,
                 kMaxDraftBranches);
  check_argument(options.draft_branches == 1 || drafts,
                 "draft_branches is {}, which needs drafts of a model or a head; speculate is '{}'",
                 options.draft_branches, printable(options.speculate));
  if (options.speculate.empty()) {
    check_argument(!options.always_speculate, "always_speculate is true, but speculate is empty");
    return;
  }
  (void)oracle_length(options);
  check_argument(
      !oracle || options.random_weights,
      "speculate is {}, which accepts drafts whatever the model says, but random_weights "
      "is not given: the text would mean nothing",
      printable(options.speculate));
  check_argument(!options.overlap.value_or(false),
                 "speculate is {}, which does not work with overlap: drafts follow the tokens that "
                 "the pass before them draws",
                 options.speculate);
}

void check_branches(const EngineOptions& options, const ModelInfo& model) {
  if (options.draft_branches == 1) return;
  for (const LayerGroup& group : model.groups) {
    if (is_linear(group.spec.kind)) {
      fail(ErrorCode::unsupported,
           "draft_branches is {}, but {} has recurrent states, which follow one branch only",
           options.draft_branches, model.architecture);
    }
    if (group.context_ranks > 1) {
      fail(ErrorCode::unsupported,
           "draft_branches is {}, but each of {} ranks has a part of the context, which masks do "
           "not divide",
           options.draft_branches, group.context_ranks);
    }
  }
}

int32_t prompt_rows(const EngineOptions& options, const ModelInfo& model) {
  const size_t row_bytes = static_cast<size_t>(model.vocabulary) * sizeof(float);
  const auto rows = static_cast<int64_t>(kPromptLogitBytes / row_bytes);
  return static_cast<int32_t>(std::clamp<int64_t>(rows, 1, options.max_batch_tokens));
}

}  // namespace

std::optional<double> oracle_length(const EngineOptions& options) {
  if (!options.speculate.starts_with(kOraclePrefix)) return {};
  const std::string_view text = std::string_view(options.speculate).substr(kOraclePrefix.size());
  double length = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), length);
  const int32_t max = options.max_drafts + 1;
  check_argument(
      error == std::errc() && end == text.data() + text.size() && length >= 1 && length <= max,
      "speculate is '{}', its length must be a number in [1, {}], max_drafts + 1",
      printable(options.speculate), max);
  return length;
}

void check_engine_options(const EngineOptions& options) {
  const auto check = [](const char* name, int64_t value, int64_t low, int64_t high) {
    check_argument(value >= low && value <= high, "{} is {}, must be in [{}, {}]", name, value, low,
                   high);
  };
  check_argument(!options.model_path.empty(), "model_path is empty");
  check("page_size", options.page_size, 1, kMaxPageSize);
  check("max_requests", options.max_requests, 1, kMaxRequests);
  check("max_batch_tokens", options.max_batch_tokens, 1, kMaxBatchTokens);
  check("max_mixed_tokens", options.max_mixed_tokens, 0, options.max_batch_tokens);
  check("max_context", options.max_context, 0, std::numeric_limits<int32_t>::max() - 1);
  check("max_graph_requests", options.max_graph_requests, 1, kMaxRequests);
  check_speculation(options);
  check("prefix_levels", options.prefix_levels, 0, kMaxPrefixLevels);
  check("min_prefix_savings", options.min_prefix_savings.value_or(0), 0,
        std::numeric_limits<int64_t>::max());
  check("workspace_budget", options.workspace_budget, 0, std::numeric_limits<int64_t>::max());
}

size_t free_memory(Device device) {
  return device.kind == DeviceKind::cpu ? available_memory()
                                        : gpu::Context(device.index).free_bytes();
}

size_t host_logit_bytes(const SchedulerLimits& limits, int32_t vocabulary, int threads) {
  return static_cast<size_t>(vocabulary) * (limits.logit_rows() * sizeof(float) +
                                            static_cast<size_t>(threads) * Sampler::kBytesPerToken);
}

std::unique_ptr<Model> load_model_of(const EngineOptions& options,
                                     std::shared_ptr<ModelDevice> device, ThreadPool& threads) {
  std::optional<RandomSource> random;
  if (options.random_weights) random = RandomSource{*options.random_weights, &threads};
  return load_model(options.model_path, std::move(device), random);
}

SizedEngine size_engine(const EngineOptions& options, const ModelInfo& model,
                        const DeviceInfo& device, size_t free_bytes) {
  check_branches(options, model);
  SizedEngine sized;
  sized.caches = cache_options(options, model, device.device(), free_bytes);
  sized.limits = batch_limits(options, sized.caches, device);
  sized.selections =
      select_group_backends(model, sized.caches.groups, options, sized.limits, device);
  // One graph contains all layers.
  sized.cuda_graphs =
      options.cuda_graphs && std::ranges::all_of(sized.selections, [](const auto& group) {
        return group.why_no_graphs.empty();
      });
  sized.captures_extends = std::ranges::all_of(sized.selections, [](const auto& group) {
    return group.prefill.chosen->graphs == GraphSupport::always &&
           (!group.trees || group.trees->chosen->graphs == GraphSupport::always);
  });
  sized.scheduling = {
      .max_running = sized.caches.max_requests,
      .max_batch_tokens = options.max_batch_tokens,
      .max_prompt_rows = prompt_rows(options, model),
      .group_prefixes = SharedPrefixes(sized.selections, sized.limits)
                            .possible(sized.caches.max_requests, sized.limits.max_kv_len),
      .max_drafts = options.speculate.empty() ? 0 : options.max_drafts,
      .max_mixed_tokens =
          options.max_mixed_tokens > 0 ? options.max_mixed_tokens : options.max_batch_tokens};
  sized.max_width = 1 + sized.scheduling.max_drafts;
  sized.drawn_lists = has_draft_model(options) ? 2 : 1;
  sized.wanted_context = context_of(options, model);
  return sized;
}

// Adds up the parts in the order of the constructors, which call the same functions.
EngineMemory planned_memory(const Model& model, const SizedEngine& sized, int threads) {
  const ModelInfo& info = model.info();
  const bool on_cpu = model.device().kind() == DeviceKind::cpu;
  EngineMemory memory;
  memory.weights = model.weight_bytes();
  memory.caches = sized.caches.plan.bytes;
  memory.activations = model.activation_bytes(sized.limits.max_tokens);
  memory.positions = model.position_bytes(sized.limits.max_kv_len);
  for (const GroupSelection& group : sized.selections) memory.attention += group.workspace_bytes();
  memory.products = model.device().product_bytes();
  const size_t logit_row = static_cast<size_t>(info.vocabulary) * sizeof(float);
  const auto logit_rows =
      static_cast<size_t>(std::min(sized.logit_rows(), sized.limits.max_tokens));
  memory.logits = on_cpu ? host_logit_bytes(sized.scheduling, info.vocabulary, threads)
                         : logit_rows * logit_row;
  memory.batch =
      on_cpu ? host_batch_bytes(sized.limits)
             : CudaBatch::bytes(sized.limits, {sized.max_width,
                                               bits_of_masks(sized.masked_draws, info.vocabulary),
                                               sized.likeliest, sized.drawn_lists});
  return memory;
}

EnginePlan Engine::plan(const EngineOptions& given, const std::optional<DeviceInfo>& wanted) {
  return plan_rank(given, wanted, {});
}

EnginePlan plan_rank(const EngineOptions& given, const std::optional<DeviceInfo>& wanted,
                     const ModelRanks& ranks) {
  check_engine_options(given);
  check_argument(!wanted || given.kv_memory_bytes > 0,
                 "kv_memory_bytes is 0, must be given for {}: the default is half of the device's "
                 "free memory, which is unknown",
                 wanted->name);
  EngineOptions options = given;
  EnginePlan plan;
  if (options.registry == nullptr) {
    plan.own_registry = std::make_shared<const BackendRegistry>(BackendRegistry::builtin());
    options.registry = plan.own_registry.get();
  }
  ThreadPool threads(options.threads);
  DeviceInfo device = wanted ? *wanted : find_device(options.device);
  if (device.kind == DeviceKind::cpu) device.cores = threads.size();
  const std::unique_ptr<Model> model =
      load_model_of(options, make_counting_device(device, ranks), threads);
  std::optional<DraftModel> draft;
  if (has_draft_model(options)) {
    draft = load_draft_model(options, make_counting_device(device), threads, *model);
  }
  size_t free_bytes = 0;
  if (options.kv_memory_bytes == 0) {
    free_bytes = free_memory(device.device());
    free_bytes -= std::min(free_bytes, model->device().weight_bytes());
    if (draft) free_bytes -= std::min(free_bytes, draft->model->device().weight_bytes());
  }
  if (draft) divide_budget(model->info(), free_bytes, options, *draft);
  SizedEngine sized = size_engine(options, model->info(), device, free_bytes);
  plan.memory = planned_memory(*model, sized, threads.size());
  if (draft) {
    const SizedEngine drafting = size_draft_model(*draft, device);
    plan.memory.drafter = draft_bytes(
        *draft, drafting, sized.caches.plan.pages * sized.caches.page_size, threads.size());
  }
  plan.max_context = sized.limits.max_kv_len;
  plan.wanted_context = sized.wanted_context;
  plan.selections = std::move(sized.selections);
  return plan;
}

std::string EngineMemory::explain() const {
  const std::pair<std::string_view, size_t> parts[] = {
      {"weights", weights},         {"caches", caches},
      {"activations", activations}, {"tables of positions", positions},
      {"logits", logits},           {"attention workspace", attention},
      {"batch arrays", batch},      {"matrix products", products},
      {"graphs", graphs},           {"draft model", drafter}};
  const auto megabytes = [](size_t bytes) { return static_cast<double>(bytes) / 1e6; };
  std::string text;
  for (const auto& [part, bytes] : parts) {
    if (bytes > 0) text += fmt::format("{} {:.1f} MB, ", part, megabytes(bytes));
  }
  return fmt::format("memory: {}together {:.1f} MB\n", text, megabytes(total()));
}

std::string EngineGraphs::explain() const {
  const std::pair<std::string_view, GraphCount> kinds[] = {
      {"decodes", decodes},
      {"decodes with shared prefixes", shared_prefixes},
      {"verifications of drafts", drafts},
      {"chunks of prompts", chunks}};
  std::string text;
  for (const auto& [kind, count] : kinds) {
    if (count.graphs == 0) continue;
    text += fmt::format("{}{} of {} {:.1f} MB", text.empty() ? "graphs: " : ", ", count.graphs,
                        kind, static_cast<double>(count.bytes) / 1e6);
  }
  return text.empty() ? text : text + "\n";
}

std::string EnginePlan::explain() const {
  std::string text;
  for (const GroupSelection& selection : selections) text += fovea::explain(selection);
  text += memory.explain();
  if (max_context < wanted_context) {
    text += fmt::format("the context is limited to {} of {} requested tokens\n", max_context,
                        wanted_context);
  }
  return text;
}

}  // namespace fovea
