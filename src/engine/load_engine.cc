// SPDX-License-Identifier: Apache-2.0
// Engine::load: everything is checked, sized and selected before anything is allocated.
#include <algorithm>
#include <filesystem>
#include <new>
#include <utility>

#include "attention/prefix_levels.h"
#include "core/check.h"
#include "core/quote.h"
#include "engine/available_memory.h"
#include "engine/shared_prefixes.h"
#include "engine/text_engine.h"
#include "fovea/gpu.h"
#include "gpu/gpu.h"
#include "model/cuda_device.h"

namespace fovea {
namespace {

constexpr int32_t kMaxPageSize = 65536;
constexpr int32_t kMaxRequests = 65535;
constexpr int32_t kMaxBatchTokens = 1 << 20;
// Logits of scored prompts are a buffer of this size, not one of max_batch_tokens rows: 512 rows of
// a vocabulary of 150,000 would be 300 MB.
constexpr size_t kPromptLogitBytes = size_t{16} << 20;
// Of a layer, docs/kernels/cascade.md: two requests that share 1 MB decode 1.5 times as fast on a
// core; what requests share in a GPU's L2 cache is cheap to read again (2026-11-23).
constexpr int64_t kCpuPrefixSavings = 1'000'000;
constexpr int64_t kGpuPrefixSavings = 512'000'000;

void check_options(const EngineOptions& options) {
  const auto check = [](const char* name, int64_t value, int64_t low, int64_t high) {
    check_argument(value >= low && value <= high, "{} is {}, must be in [{}, {}]", name, value, low,
                   high);
  };
  check_argument(!options.model_path.empty(), "model_path is empty");
  check("page_size", options.page_size, 1, kMaxPageSize);
  check("max_requests", options.max_requests, 1, kMaxRequests);
  check("max_batch_tokens", options.max_batch_tokens, 1, kMaxBatchTokens);
  check("max_context", options.max_context, 0, std::numeric_limits<int32_t>::max() - 1);
  check("max_graph_requests", options.max_graph_requests, 1, kMaxRequests);
  check("prefix_levels", options.prefix_levels, 0, kMaxPrefixLevels);
  check("min_prefix_savings", options.min_prefix_savings.value_or(0), 0,
        std::numeric_limits<int64_t>::max());
}

int32_t context_of(const EngineOptions& options, const ModelInfo& model) {
  check_argument(options.max_context <= model.max_context,
                 "max_context is {}, the model was made for {}", options.max_context,
                 model.max_context);
  check_argument(options.max_context <= kLongestContext,
                 "max_context is {}, Fovea serves contexts of up to {}", options.max_context,
                 kLongestContext);
  return options.max_context > 0 ? options.max_context : model.default_context;
}

size_t free_memory(Device device) {
  return device.kind == DeviceKind::cpu ? available_memory()
                                        : gpu::Context(device.index).free_bytes();
}

CacheSetOptions cache_options(const EngineOptions& options, const ModelInfo& model, Device device) {
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
  demand.budget = options.kv_memory_bytes > 0 ? options.kv_memory_bytes : free_memory(device) / 2;
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
  if (options.prefix_cache) limits.prefix_levels = options.prefix_levels;
  limits.min_prefix_savings = options.min_prefix_savings.value_or(
      device.kind == DeviceKind::cpu ? kCpuPrefixSavings : kGpuPrefixSavings);
  return limits;
}

std::shared_ptr<ModelDevice> make_model_device(const EngineOptions& options,
                                               const DeviceInfo& device, ThreadPool& threads) {
  if (device.kind == DeviceKind::cpu) return make_host_device(threads);
  return make_cuda_device({.index = device.index,
                           .max_rows = options.max_batch_tokens,
                           .row_invariant = options.batch_invariant});
}

std::unique_ptr<Model> load_model(const EngineOptions& options, const DeviceInfo& device,
                                  ThreadPool& threads) {
  std::optional<RandomSource> random;
  if (options.random_weights) random = RandomSource{*options.random_weights, &threads};
  return load_model(options.model_path, make_model_device(options, device, threads), random);
}

Tokenizer load_tokenizer(const EngineOptions& options) {
  const std::filesystem::path file = std::filesystem::path(options.model_path) / "tokenizer.json";
  std::error_code ignored;
  if (options.random_weights && !std::filesystem::exists(file, ignored)) return Tokenizer::none();
  return Tokenizer::open(file.string());
}

int32_t prompt_rows(const EngineOptions& options, const ModelInfo& model) {
  const size_t row_bytes = static_cast<size_t>(model.vocabulary) * sizeof(float);
  const auto rows = static_cast<int64_t>(kPromptLogitBytes / row_bytes);
  return static_cast<int32_t>(std::clamp<int64_t>(rows, 1, options.max_batch_tokens));
}

std::unique_ptr<Engine> load_checked(const EngineOptions& given) {
  EngineOptions options = given;
  std::unique_ptr<BackendRegistry> own_registry;
  if (options.registry == nullptr) {
    own_registry = std::make_unique<BackendRegistry>(BackendRegistry::builtin());
    options.registry = own_registry.get();
  }
  auto threads = std::make_unique<ThreadPool>(options.threads);
  const DeviceInfo device = find_device(options.device);
  std::unique_ptr<Model> model = load_model(options, device, *threads);
  Tokenizer tokenizer = load_tokenizer(options);

  const ModelInfo& info = model->info();
  CacheSetOptions caching = cache_options(options, info, device.device());
  const BatchLimits limits = batch_limits(options, caching, device);
  std::vector<GroupSelection> selections =
      select_group_backends(info, caching.groups, options, limits, device);
  // One graph holds all layers.
  options.cuda_graphs =
      options.cuda_graphs && std::ranges::all_of(selections, [](const auto& group) {
        return group.why_no_graphs.empty();
      });

  EngineParts parts{std::move(own_registry), std::move(threads), std::move(model),
                    std::move(tokenizer)};
  parts.selections = std::move(selections);
  parts.request_limits = {info.vocabulary, caching.plan.max_context, context_of(given, info)};
  parts.limits = {.max_running = caching.max_requests,
                  .max_batch_tokens = options.max_batch_tokens,
                  .max_prompt_rows = prompt_rows(options, info),
                  .group_prefixes = SharedPrefixes(parts.selections, limits)
                                        .possible(caching.max_requests, limits.max_kv_len)};
  parts.stats.kv_bytes = caching.plan.bytes;
  parts.stats.weight_bytes = parts.model->weight_bytes();
  parts.caches = std::make_unique<CacheSet>(std::move(caching));
  parts.runner = make_model_runner(*parts.model, *parts.caches, *parts.threads, parts.selections,
                                   {limits, options.max_graph_requests, options.cuda_graphs});
  return std::make_unique<TextEngine>(std::move(parts));
}

}  // namespace

std::unique_ptr<Engine> Engine::load(const EngineOptions& options) {
  check_options(options);
  try {
    return load_checked(options);
  } catch (const std::bad_alloc&) {
    fail(ErrorCode::out_of_memory, "memory ended while {} was loaded",
         printable(options.model_path));
  }
}

}  // namespace fovea
