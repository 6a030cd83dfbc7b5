// SPDX-License-Identifier: Apache-2.0
// A backend around that of a rank's pool. plan() translates the batch on the device, so that a
// captured pass serves any lengths. A prompt is divided into as many requests as there are ranks,
// which take its new tokens in turn: each of them then sees one key of the rank more than the one
// before it in its request, and the local backend's causal order is right.
#include "dist/cuda_context_backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "attention/validate/layer.h"
#include "attention/workspace.h"
#include "core/check.h"
#include "core/rounding.h"
#include "dist/context_checks.h"
#include "dist/cuda_context_exchange.h"
#include "kernels/cuda/store.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

struct Buffers {
  int32_t *indptr = nullptr, *lens = nullptr, *rows = nullptr;  // local requests
  int32_t* order = nullptr;                                     // [max_tokens]
  int64_t* slots = nullptr;                                     // [max_tokens]
  int32_t* pages = nullptr;                                     // [max_requests, pages_of_row]
  std::byte *q = nullptr, *out = nullptr;                       // rows of all heads
  float* lse = nullptr;
};

int32_t pages_of_row(const ContextBackendOptions& options, const BatchLimits& limits) {
  const BatchLimits local = local_limits(options.shards, limits, DeviceKind::cuda);
  return ceil_div(local.max_kv_len, options.page_size);
}

Buffers carve(WorkspaceCarver& workspace, const ContextBackendOptions& options,
              const BatchLimits& limits) {
  const BatchLimits local = local_limits(options.shards, limits, DeviceKind::cuda);
  const ContextExchangeShape shape =
      exchange_shape(options, options.shards.ranks, limits.max_tokens, {});
  const int64_t states = int64_t{limits.max_tokens} * options.spec.q_heads;
  const auto element = static_cast<int64_t>(dtype_bytes(shape.dtype));
  Buffers buffers;
  buffers.indptr = workspace.take<int32_t>(int64_t{local.max_requests} + 1);
  buffers.lens = workspace.take<int32_t>(local.max_requests);
  buffers.rows = workspace.take<int32_t>(local.max_requests);
  buffers.order = workspace.take<int32_t>(limits.max_tokens);
  buffers.slots = workspace.take<int64_t>(limits.max_tokens);
  buffers.pages =
      workspace.take<int32_t>(int64_t{limits.max_requests} * pages_of_row(options, limits));
  buffers.q = workspace.take<std::byte>(states * shape.q_dim * element);
  buffers.out = workspace.take<std::byte>(states * shape.dim * element);
  buffers.lse = workspace.take<float>(states);
  return buffers;
}

class CudaContextBackend final : public AttentionBackend {
 public:
  CudaContextBackend(std::unique_ptr<AttentionBackend> local, const ContextBackendOptions& options,
                     ContextLinks& links, std::unique_ptr<ContextLinks> own)
      : own_links_(std::move(own)),
        links_(links),
        local_(std::move(local)),
        options_(options),
        name_(fmt::format("context({})", local_->name())) {
    links_.context().bind();
    plan_.emplace(links_.context().info().sm, cuda::kernel_store());
  }
  ~CudaContextBackend() override { links_.context().bind_to_free(); }

  std::string_view name() const override { return name_; }
  Device device() const override { return local_->device(); }
  const KvPool* kv() const override { return local_->kv(); }

  size_t workspace_bytes(const BatchLimits& limits) const override {
    return context_workspace_bytes(options_, limits) +
           local_->workspace_bytes(local_limits(options_.shards, limits, DeviceKind::cuda));
  }

  void reserve(const BatchLimits& limits, std::span<std::byte> workspace) override {
    const size_t needed = workspace_bytes(limits);
    links_.context().bind();
    const auto given = memory_.given_or_own(workspace, needed, device(), name());
    WorkspaceCarver carver(given.data());
    buffers_ = carve(carver, options_, limits);
    local_->reserve(local_limits(options_.shards, limits, DeviceKind::cuda),
                    given.subspan(carver.bytes()));
    limits_ = limits;
    exchange_.emplace(exchange_shape(options_, links_.size(), limits.max_tokens, device()), links_);
    planned_ = false;
  }

  void plan(const BatchView& batch, Stream stream) override {
    planned_ = false;
    check_batch(batch);
    links_.context().bind();
    tokens_ = batch.mode == ForwardMode::idle || batch.requests == 0 ? 0 : batch.tokens;
    classes_ = classes_of(batch);
    exchange_->set_order(classes_ > 1 ? buffers_.order : nullptr);
    if (tokens_ > 0) plan_->run(plan_params(batch), stream);
    local_->plan(tokens_ > 0 ? local_batch(batch) : BatchView{}, stream);
    planned_ = true;
  }

  void forward(const LayerTensors& layer, Stream stream) override {
    check_argument(planned_, "forward() without a plan");
    if (!layer.q) return local_->forward(layer, stream);
    if (tokens_ == 0) return;
    check_context_layer(layer);
    const ContextExchangeShape shape = exchange_shape(options_, links_.size(), tokens_, device());
    LayerTensors whole = layer;
    whole.q = dense_rows(buffers_.q, shape.dtype, options_.spec.q_heads, shape.q_dim);
    whole.out = dense_rows(buffers_.out, shape.dtype, options_.spec.q_heads, shape.dim);
    whole.lse = NaturalLse(buffers_.lse);
    whole.scores.sinks = nullptr;
    exchange_->gather_queries(layer.q, whole.q, tokens_, stream);
    if (classes_ > 1 && stores(layer)) {
      // Keys come in the order of the tokens, but queries do not.
      LayerTensors keys = layer;
      keys.q = {};
      local_->forward(keys, stream);
      whole.save_kv = false;
    }
    local_->forward(whole, stream);
    exchange_->merge({whole.out, whole.lse}, {layer.out, layer.lse}, tokens_, layer.scores.sinks,
                     stream);
  }

 private:
  // The local backend checks the rest, as its arrays are of the same sizes.
  void check_batch(const BatchView& batch) const {
    check_argument(exchange_.has_value(), "plan() before reserve()");
    check_context_batch(batch, limits_);
    const int32_t longest =
        batch.hints.max_kv_len > 0 ? batch.hints.max_kv_len : limits_.max_kv_len;
    check_argument(batch.requests == 0 || longest <= batch.table.stride * batch.table.entry_tokens,
                   "hints.max_kv_len is {}, a row of table has {} tokens", longest,
                   batch.table.stride * batch.table.entry_tokens);
  }

  // Requests that each request becomes; 0: one for each new token.
  int32_t classes_of(const BatchView& batch) const {
    const int32_t longest = batch.hints.max_q_len > 0 ? batch.hints.max_q_len : limits_.max_q_len;
    if (batch.mode == ForwardMode::decode || longest == 1) return 1;
    return options_.shards.interleave == 1 ? options_.shards.ranks : 0;
  }
  int32_t local_requests(const BatchView& batch) const {
    return classes_ == 0 ? batch.tokens : batch.requests * classes_;
  }

  cuda::ContextPlanParams plan_params(const BatchView& batch) const {
    cuda::ContextPlanParams params{};
    params.q_indptr = batch.q_indptr.data();
    params.kv_lens = batch.kv_lens.data();
    params.request_rows = batch.request_rows.data();
    params.table = batch.table.entries;
    params.table_stride = batch.table.stride;
    params.entry_tokens = batch.table.entry_tokens;
    params.out_slots = batch.out_slots.data();
    params.requests = batch.requests;
    params.tokens = batch.tokens;
    params.rank = links_.rank();
    params.ranks = links_.size();
    params.interleave = options_.shards.interleave;
    params.page_size = options_.page_size;
    params.classes = classes_;
    params.local_indptr = buffers_.indptr;
    params.local_lens = buffers_.lens;
    params.local_rows = buffers_.rows;
    params.order = buffers_.order;
    params.slots = buffers_.slots;
    params.pages = buffers_.pages;
    params.pages_stride = pages_of_row(options_, limits_);
    return params;
  }

  BatchView local_batch(const BatchView& batch) {
    const auto requests = static_cast<size_t>(local_requests(batch));
    BatchView local;
    local.mode = classes_ > 1 ? batch.mode : ForwardMode::decode;
    if (local.mode == ForwardMode::target_verify) local.mode = ForwardMode::extend;
    local.requests = static_cast<int32_t>(requests);
    local.tokens = batch.tokens;
    local.q_indptr = {buffers_.indptr, requests + 1};
    local.kv_lens = {buffers_.lens, requests};
    local.request_rows = {buffers_.rows, requests};
    local.table = {.entries = buffers_.pages,
                   .stride = pages_of_row(options_, limits_),
                   .entry_tokens = options_.page_size,
                   .rows = limits_.max_requests};
    local.out_slots = {buffers_.slots, static_cast<size_t>(batch.tokens)};
    set_hints(batch.hints, local);
    return local;
  }

  // Rank 0 has the most tokens of a request.
  int32_t local_bound(int32_t length) const {
    return static_cast<int32_t>(options_.shards.local_length(length, 0));
  }
  // New tokens of class `index`.
  int32_t part_of_class(int32_t q_len, int32_t index) const {
    return ceil_div(std::max(0, q_len - index), classes_);
  }
  void set_hints(const BatchHints& whole, BatchView& local) {
    local.hints.max_kv_len = local_bound(whole.max_kv_len);
    // With a request for each new token, the new ones before it count as older ones.
    local.hints.prefix_written = whole.prefix_written && classes_ > 0;
    if (classes_ <= 1) return;
    local.hints.max_q_len = part_of_class(whole.max_q_len, 0);
    if (whole.host_q_lens.empty()) return;
    host_q_lens_.clear();
    host_kv_lens_.clear();
    for (int32_t i = 0; i < local.requests; ++i) {
      const auto request = static_cast<size_t>(i / classes_);
      host_q_lens_.push_back(part_of_class(whole.host_q_lens[request], i % classes_));
      host_kv_lens_.push_back(local_bound(whole.host_kv_lens[request]));
    }
    local.hints.host_q_lens = host_q_lens_;
    local.hints.host_kv_lens = host_kv_lens_;
  }

  std::unique_ptr<ContextLinks> own_links_;
  ContextLinks& links_;
  std::unique_ptr<AttentionBackend> local_;
  const ContextBackendOptions options_;
  const std::string name_;
  std::optional<cuda::ContextPlan> plan_;
  BatchLimits limits_;
  WorkspaceMemory memory_;
  Buffers buffers_;
  std::optional<CudaContextExchange> exchange_;
  // The planned batch:
  bool planned_ = false;
  int32_t tokens_ = 0, classes_ = 1;
  std::vector<int32_t> host_q_lens_, host_kv_lens_;
};

}  // namespace

size_t context_workspace_bytes(const ContextBackendOptions& options, const BatchLimits& limits) {
  WorkspaceCarver counter(nullptr);
  carve(counter, options, limits);
  return counter.bytes();
}

std::unique_ptr<AttentionBackend> make_cuda_context_backend(std::unique_ptr<AttentionBackend> local,
                                                            const ContextBackendOptions& options,
                                                            ContextLinks& links,
                                                            std::unique_ptr<ContextLinks> own) {
  check_context_options(options, local.get(), links.size());
  return std::make_unique<CudaContextBackend>(std::move(local), options, links, std::move(own));
}

}  // namespace fovea
