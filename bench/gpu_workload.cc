// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_workload.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "bench/clock.h"
#include "core/check.h"
#include "core/rounding.h"

namespace fovea::bench {
namespace {

// Min size of the caches, and of the queries, over which layers rotate. Several times the size of
// the L2 cache.
constexpr double kColdCacheBytes = 2e9;
constexpr double kColdQueryBytes = 256e6;
constexpr double kMaxSets = 256;

int64_t pages_needed(const GpuCase& config) {
  int64_t pages = 0;
  for (size_t i = 0; i < config.requests.size(); ++i) {
    const int32_t shared = config.begins_group(i) ? 0 : config.shared_prefix;
    pages += ceil_div(config.requests[i].kv_len - shared, config.page_size);
  }
  return pages;
}

}  // namespace

struct GpuWorkload::Setup {
  Setup(const GpuCase& config_, MeasureKernels& kernels_) : config(config_), kernels(kernels_) {}

  const GpuCase config;
  MeasureKernels& kernels;
  std::string backend_name;
  double create_seconds = 0;
  int32_t cache_sets = 1, query_sets = 1;
  std::unique_ptr<LentPool> pool;
  std::unique_ptr<AttentionBackend> backend;
  std::vector<int32_t> q_indptr{0}, q_lens, lengths;
  gpu::DeviceBuffer q, out;
  gpu::DeviceBuffer w_uk, w_uv;  // [q_heads, nope_dim or v_dim, kv_lora_rank] with MLA's weights
  // Inputs of features that the layers have.
  gpu::DeviceBuffer sinks, alibi_slopes, tree_mask, custom_mask, custom_mask_indptr, positions;
  gpu::DeviceBuffer slots, slot_rows, q_indptr_device, kv_lens, out_slots, shared_prefix;
  KvLayerView packed;  // prefill-full: keys and values of the batch, [tokens, kv_heads, dim]
  BatchView batch;

  void place_cache(CacheMemory& memory);
  void place_batch(Stream stream);
  void place_queries(Stream stream);
  void place_features(Stream stream);
  void place_custom_mask(Stream stream);
  void make_backend(const BackendWish& wish);
  int64_t query_elements() const {
    return int64_t{config.tokens()} * config.spec.q_heads * config.q_width();
  }
  int64_t out_elements() const {
    return int64_t{config.tokens()} * config.spec.q_heads * config.out_width();
  }
  DType out_dtype() const { return config.fp8_products() ? DType::bf16 : config.spec.q_dtype; }
  // Queries and results of a layer keep their addresses, as in an engine.
  char* q_of(int32_t turn) const {
    return q.data<char>() + turn % cache_sets % query_sets * query_elements() *
                                static_cast<int64_t>(dtype_bytes(config.spec.q_dtype));
  }
  char* out_of(int32_t turn) const {
    return out.data<char>() + turn % cache_sets % query_sets * out_elements() * 2;
  }
  // Returns keys and values as read by the turn's call.
  KvLayerView keys_of(int32_t turn) const;
  LayerTensors tensors(int32_t turn) const;
};

KvLayerView GpuWorkload::Setup::keys_of(int32_t turn) const {
  if (pool) return pool->layer(turn % cache_sets);
  KvLayerView view = packed;
  const auto bytes = static_cast<int64_t>(config.kv_bytes());
  view.k += turn % cache_sets * bytes;
  view.v += turn % cache_sets * bytes;
  return view;
}

void GpuWorkload::Setup::place_cache(CacheMemory& memory) {
  const auto whole = static_cast<double>(memory.values.bytes());
  const double wanted = std::ceil(kColdCacheBytes / config.kv_bytes());
  // Uses at least half as many pages again as the requests need, so that theirs are scattered.
  const double fitting = std::floor(whole / (config.kv_bytes() * 1.1));
  if (fitting < 1) {
    fail(ErrorCode::out_of_memory, "the caches need {:.1f} GB, {:.1f} GB are available",
         config.kv_bytes() * 1.1 / 1e9, whole / 1e9);
  }
  cache_sets = static_cast<int32_t>(std::min({wanted, fitting, kMaxSets}));
  if (!config.cached()) {
    packed.page_size = 1;
    packed.k = memory.values.data<char>();
    packed.v = packed.k + static_cast<int64_t>(config.kv_bytes() / 2);
    packed.k_page_stride = packed.k_token_stride =
        int64_t{config.spec.kv_heads} * config.spec.head_dim;
    packed.v_page_stride = packed.v_token_stride =
        int64_t{config.spec.kv_heads} * config.spec.head_dim_v;
    packed.k_head_stride = config.spec.head_dim;
    packed.v_head_stride = config.spec.head_dim_v;
    return;
  }
  const KvCacheSpec spec = config.cache(cache_sets);
  // bytes_per_page includes all layers, and scales that lie elsewhere, so this uses slightly less
  // memory.
  const auto pages = static_cast<int64_t>(memory.values.bytes() / spec.bytes_per_page());
  pool = std::make_unique<LentPool>(spec, memory, pages, kernels.context().info().device());
}

// Places pages in random order over the whole pool, as after hours of service.
void GpuWorkload::Setup::place_batch(Stream stream) {
  const int32_t page = config.page_size;
  const auto stride = static_cast<size_t>(config.longest_kv());
  std::vector<int32_t> table(config.requests.size() * stride, 0);
  std::vector<int32_t> pages;
  if (pool) {
    pages.resize(static_cast<size_t>(pool->pages() - 1));
    std::iota(pages.begin(), pages.end(), 1);
    std::mt19937_64 random(7);
    const auto needed = static_cast<size_t>(pages_needed(config));
    for (size_t i = 0; i < needed; ++i) {
      std::swap(pages[i], pages[i + random() % (pages.size() - i)]);
    }
  }
  std::vector<int32_t> rows;
  std::vector<int64_t> new_slots;
  const auto shared_pages = static_cast<size_t>(config.shared_prefix / page);
  size_t group_page = 0;  // first page of the current group's shared pages
  size_t next_page = 0;   // next page for a request alone
  std::vector<int32_t> shared;
  for (const RequestLengths& request : config.requests) {
    const bool begins = config.begins_group(rows.size());
    if (begins) {
      group_page = next_page;
      next_page += shared_pages;
    }
    shared.push_back(begins ? 0 : config.shared_prefix);
    int32_t* row = table.data() + rows.size() * stride;
    for (int32_t t = 0; t < request.kv_len; ++t) {
      const auto nth = static_cast<size_t>(t / page);
      row[t] = !pool                ? q_indptr.back() + t
               : nth < shared_pages ? pages[group_page + nth] * page + t % page
                                    : pages[next_page + nth - shared_pages] * page + t % page;
      if (t >= request.kv_len - request.q_len) new_slots.push_back(row[t]);
    }
    next_page += static_cast<size_t>((request.kv_len - config.shared_prefix + page - 1) / page);
    rows.push_back(static_cast<int32_t>(rows.size()));
    q_lens.push_back(request.q_len);
    lengths.push_back(request.kv_len);
    q_indptr.push_back(q_indptr.back() + request.q_len);
  }
  slots = gpu::to_device(table, stream);
  slot_rows = gpu::to_device(rows, stream);
  kv_lens = gpu::to_device(lengths, stream);
  out_slots = gpu::to_device(new_slots, stream);
  q_indptr_device = gpu::to_device(q_indptr, stream);
  batch.mode = config.phase.ends_with("mixed")      ? ForwardMode::mixed
               : config.longest_q() == 1            ? ForwardMode::decode
               : config.spec.mask == MaskKind::tree ? ForwardMode::target_verify
                                                    : ForwardMode::extend;
  batch.requests = static_cast<int32_t>(config.requests.size());
  batch.tokens = config.tokens();
  batch.hints.max_q_len = config.longest_q();
  batch.hints.max_kv_len = config.longest_kv();
  batch.hints.host_q_lens = q_lens;
  batch.hints.host_kv_lens = lengths;
  batch.q_indptr = q_indptr_device.span<int32_t>();
  batch.kv_lens = kv_lens.span<int32_t>();
  if (!pool) return;
  batch.request_rows = slot_rows.span<int32_t>();
  batch.table = {.entries = slots.data<int32_t>(),
                 .stride = static_cast<int64_t>(stride),
                 .rows = batch.requests};
  batch.out_slots = out_slots.span<int64_t>();
  batch.hints.prefix_written = true;
  if (config.prefix_levels == 0) return;
  shared_prefix = gpu::to_device(shared, stream);
  batch.hints.shared_prefix = shared_prefix.span<int32_t>();
}

void GpuWorkload::Setup::place_queries(Stream stream) {
  const double set = static_cast<double>(query_elements()) *
                         static_cast<double>(dtype_bytes(config.spec.q_dtype)) +
                     2.0 * static_cast<double>(out_elements());
  query_sets = static_cast<int32_t>(
      std::clamp(std::ceil(kColdQueryBytes / set), 1.0, static_cast<double>(cache_sets)));
  q = gpu::DeviceBuffer(static_cast<size_t>(query_elements() * query_sets) *
                        dtype_bytes(config.spec.q_dtype));
  out = gpu::DeviceBuffer(static_cast<size_t>(out_elements() * query_sets) * 2);
  kernels.fill_noise(q.data(), config.spec.q_dtype, query_elements() * query_sets, 3, 1, 0, stream);
  if (!config.has_mla_weights()) return;
  // Keys and values of unit variance, like the latents.
  const float spread = 1 / std::sqrt(static_cast<float>(config.spec.mla.kv_lora_rank));
  const auto fill = [&](gpu::DeviceBuffer& weights, int32_t width, uint32_t seed) {
    const int64_t elements = int64_t{config.spec.q_heads} * width * config.spec.mla.kv_lora_rank;
    weights = gpu::DeviceBuffer(static_cast<size_t>(elements) * sizeof(uint16_t));
    kernels.fill_noise(weights.data(), config.spec.q_dtype, elements, seed, spread, 0, stream);
  };
  fill(w_uk, config.spec.mla.nope_dim, 5);
  fill(w_uv, config.spec.mla.v_dim, 6);
}

// Sets slopes as in ALiBi's models. A tree of drafts is a chain.
void GpuWorkload::Setup::place_features(Stream stream) {
  const auto heads = static_cast<size_t>(config.spec.q_heads);
  std::vector<float> slopes(heads);
  for (size_t head = 0; head < heads; ++head) {
    slopes[head] = std::exp2(-8 * static_cast<float>(head + 1) / static_cast<float>(heads));
  }
  if (config.spec.scores.has_alibi) alibi_slopes = gpu::to_device(slopes, stream);
  if (config.spec.scores.has_sinks) sinks = gpu::to_device(std::vector<float>(heads, 1), stream);
  if (config.gives_positions) {
    std::vector<int32_t> at;
    for (const RequestLengths& request : config.requests) {
      for (int32_t token = request.kv_len - request.q_len; token < request.kv_len; ++token)
        at.push_back(token);
    }
    positions = gpu::to_device(at, stream);
    batch.positions = positions.span<int32_t>();
  }
  if (config.spec.mask == MaskKind::custom) place_custom_mask(stream);
  if (config.spec.mask != MaskKind::tree) return;
  std::vector<uint64_t> ancestors;
  for (const RequestLengths& request : config.requests) {
    for (int32_t draft = 0; draft < request.q_len; ++draft)
      ancestors.push_back(~uint64_t{0} >> (63 - draft));
  }
  tree_mask = gpu::to_device(ancestors, stream);
  batch.masks.tree.ancestors = tree_mask.span<uint64_t>();
}

void GpuWorkload::Setup::place_custom_mask(Stream stream) {
  std::vector<uint8_t> mask;
  std::vector<int64_t> indptr{0};
  for (const RequestLengths& request : config.requests) {
    for (int32_t token = 0; token < request.q_len; ++token) {
      const auto [begin, end] = config.visible(request, token);
      for (int32_t key = 0; key < request.kv_len; ++key) mask.push_back(key >= begin && key < end);
    }
    indptr.push_back(static_cast<int64_t>(mask.size()));
  }
  custom_mask = gpu::to_device(mask, stream);
  custom_mask_indptr = gpu::to_device(indptr, stream);
  batch.masks.custom.visible = custom_mask.span<uint8_t>();
  batch.masks.custom.indptr = custom_mask_indptr.span<int64_t>();
}

void GpuWorkload::Setup::make_backend(const BackendWish& wish) {
  const double start = now();
  BackendRequest request;
  request.spec = config.spec;
  request.cache = config.cache(cache_sets);
  request.limits = {.max_requests = static_cast<int32_t>(config.requests.size()),
                    .max_tokens = config.tokens(),
                    .max_q_len = config.longest_q(),
                    .max_kv_len = config.longest_kv(),
                    .prefix_levels = config.prefix_levels,
                    .min_prefix_savings = config.min_prefix_savings};
  request.device = kernels.context().info();
  const BackendRegistry registry = BackendRegistry::builtin();
  const Selection selection = select_backend(registry, request, wish);
  backend_name = selection.chosen->name;
  backend = selection.chosen->create(
      {.spec = config.spec, .kv = pool.get(), .device = request.device.device()});
  backend->reserve(request.limits);
  create_seconds = now() - start;
}

LayerTensors GpuWorkload::Setup::tensors(int32_t turn) const {
  LayerTensors layer;
  layer.layer = pool ? turn % cache_sets : 0;
  layer.save_kv = false;
  layer.scores.sinks = sinks.data<float>();
  layer.scores.alibi_slopes = alibi_slopes.data<float>();
  layer.q = dense_rows(q_of(turn), config.spec.q_dtype, config.spec.q_heads, config.q_width());
  layer.out = dense_rows(out_of(turn), out_dtype(), config.spec.q_heads, config.out_width());
  if (config.has_mla_weights()) {
    layer.mla.weights = {.dtype = config.spec.q_dtype, .w_uk = w_uk.data(), .w_uv = w_uv.data()};
  }
  if (!pool) {
    const KvLayerView keys = keys_of(turn);
    layer.k = dense_rows(keys.k, config.kv_dtype, config.spec.kv_heads, config.spec.head_dim);
    layer.v = dense_rows(keys.v, config.kv_dtype, config.spec.kv_heads, config.spec.head_dim_v);
  }
  return layer;
}

GpuWorkload::GpuWorkload(const GpuCase& config, const BackendWish& wish, MeasureKernels& kernels,
                         CacheMemory& memory, Stream stream)
    : setup_(std::make_unique<Setup>(config, kernels)) {
  setup_->place_cache(memory);
  setup_->make_backend(wish);
  make_noise(config, kernels, memory, stream);
  setup_->place_batch(stream);
  setup_->place_queries(stream);
  setup_->place_features(stream);
}
GpuWorkload::~GpuWorkload() = default;

int32_t GpuWorkload::sets() const { return setup_->cache_sets; }
const std::string& GpuWorkload::backend() const { return setup_->backend_name; }
double GpuWorkload::create_seconds() const { return setup_->create_seconds; }
void GpuWorkload::plan(Stream stream) { setup_->backend->plan(setup_->batch, stream); }
void GpuWorkload::forward(int32_t turn, Stream stream) {
  setup_->backend->forward(setup_->tensors(turn), stream);
}

OutputError GpuWorkload::check(int32_t turn, Stream stream) {
  const Setup& setup = *setup_;
  gpu::fill_bytes(setup.out_of(turn), 0xff, static_cast<size_t>(setup.out_elements()) * 2, stream);
  forward(turn, stream);
  return check_output(setup.config,
                      {.keys = setup.keys_of(turn),
                       .q = setup.q_of(turn),
                       .out = setup.out_of(turn),
                       .out_dtype = setup.out_dtype(),
                       .w_uk = setup.w_uk.data(),
                       .w_uv = setup.w_uv.data(),
                       .sinks = setup.sinks.data<float>(),
                       .alibi_slopes = setup.alibi_slopes.data<float>(),
                       .slots = setup.slots.data<int32_t>(),
                       .q_indptr = setup.q_indptr},
                      setup.kernels, stream);
}

}  // namespace fovea::bench
