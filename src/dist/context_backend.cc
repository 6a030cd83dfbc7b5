// SPDX-License-Identifier: Apache-2.0
// An attention backend whose context is distributed over ranks: translates batches of the whole to
// those of a rank's pool, and exchanges queries and states around the local backend.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/rounding.h"
#include "dist/context_checks.h"
#include "dist/cuda_context_backend.h"
#include "fovea/context_parallel.h"

namespace fovea {
namespace {

class ContextBackend final : public AttentionBackend {
 public:
  ContextBackend(std::unique_ptr<AttentionBackend> local, const ContextBackendOptions& options,
                 Communicator& ranks, ThreadPool& threads)
      : local_(std::move(local)),
        options_(options),
        ranks_(ranks),
        threads_(threads),
        name_(fmt::format("context({})", local_->name())) {}

  std::string_view name() const override { return name_; }
  Device device() const override { return local_->device(); }
  const KvPool* kv() const override { return local_->kv(); }

  size_t workspace_bytes(const BatchLimits& limits) const override {
    return local_->workspace_bytes(local_limits(options_.shards, limits, DeviceKind::cpu));
  }

  void reserve(const BatchLimits& limits, std::span<std::byte> workspace) override {
    const BatchLimits local = local_limits(options_.shards, limits, DeviceKind::cpu);
    local_->reserve(local, workspace);
    limits_ = limits;
    const auto tokens = static_cast<size_t>(limits.max_tokens);
    pages_of_row_ = ceil_div(local.max_kv_len, options_.page_size);
    pages_.resize(static_cast<size_t>(limits.max_requests) * static_cast<size_t>(pages_of_row_));
    visible_.resize(tokens);
    row_of_token_.resize(tokens);
    slots_.resize(tokens);
    indptr_.resize(tokens + 1);
    std::iota(indptr_.begin(), indptr_.end(), 0);
    const AttentionSpec& spec = options_.spec;
    const ContextExchangeShape shape =
        exchange_shape(options_, ranks_.size(), limits.max_tokens, device());
    exchange_ = make_context_exchange(shape, ranks_, threads_);
    const size_t rows = tokens * static_cast<size_t>(spec.q_heads);
    const size_t element = dtype_bytes(shape.dtype);
    q_.resize(rows * static_cast<size_t>(shape.q_dim) * element);
    out_.resize(rows * static_cast<size_t>(shape.dim) * element);
    lse_.resize(rows);
    tokens_ = -1;
  }

  void plan(const BatchView& batch, Stream stream) override {
    tokens_ = -1;
    check_batch(batch);
    const auto requests = static_cast<size_t>(batch.requests);
    const auto tokens = static_cast<size_t>(batch.tokens);
    visible_lengths(options_.shards, ranks_.rank(), batch.q_indptr.first(requests + 1),
                    batch.kv_lens.first(requests), visible_);
    std::fill_n(slots_.begin(), tokens, -1);
    if (!batch.out_slots.empty()) {
      local_slots(options_.shards, options_.page_size, ranks_.rank(), batch.out_slots.first(tokens),
                  slots_);
    }
    for (int32_t i = 0; i < batch.requests; ++i) list_pages(batch, i);
    local_->plan(local_batch(batch.tokens), stream);
    tokens_ = batch.tokens;
  }

  void forward(const LayerTensors& layer, Stream stream) override {
    check_argument(tokens_ >= 0, "forward() without a plan");
    if (!layer.q) return local_->forward(layer, stream);
    const AttentionSpec& spec = options_.spec;
    check_context_layer(layer);
    const ContextExchangeShape shape = exchange_shape(options_, ranks_.size(), tokens_, device());
    LayerTensors whole = layer;
    whole.q = dense_rows(q_.data(), shape.dtype, spec.q_heads, shape.q_dim);
    whole.out = dense_rows(out_.data(), shape.dtype, spec.q_heads, shape.dim);
    whole.lse = NaturalLse(lse_.data());
    whole.scores.sinks = nullptr;
    exchange_->gather_queries(layer.q, whole.q, tokens_, stream);
    local_->forward(whole, stream);
    exchange_->merge({whole.out, whole.lse}, {layer.out, layer.lse}, tokens_, layer.scores.sinks,
                     stream);
  }

 private:
  void check_batch(const BatchView& batch) const {
    check_argument(exchange_ != nullptr, "plan() before reserve()");
    check_context_batch(batch, limits_);
    const auto requests = static_cast<size_t>(batch.requests);
    check_argument(batch.q_indptr[requests] == batch.tokens, "q_indptr[{}] is {}, tokens is {}",
                   requests, batch.q_indptr[requests], batch.tokens);
    for (size_t i = 0; i < requests; ++i) {
      check_argument(batch.kv_lens[i] <= limits_.max_kv_len, "kv_lens[{}] is {}, at most {}", i,
                     batch.kv_lens[i], limits_.max_kv_len);
      check_argument(batch.request_rows[i] >= 0 && batch.request_rows[i] < batch.table.rows,
                     "request_rows[{}] is {}, must be in [0, {})", i, batch.request_rows[i],
                     batch.table.rows);
      check_argument(batch.kv_lens[i] <= batch.table.stride * batch.table.entry_tokens,
                     "kv_lens[{}] is {}, a row of table has {} tokens", i, batch.kv_lens[i],
                     batch.table.stride * batch.table.entry_tokens);
    }
  }

  // Lists the pages of a request, which have the same numbers in the rank's pool, and notes the
  // request of its new tokens.
  void list_pages(const BatchView& batch, int32_t request) {
    const auto i = static_cast<size_t>(request);
    const int64_t wide = int64_t{options_.page_size} * options_.shards.ranks;
    const int64_t local = options_.shards.local_length(batch.kv_lens[i], ranks_.rank());
    int32_t* const pages = pages_.data() + int64_t{request} * pages_of_row_;
    for (int64_t page = 0; page < ceil_div<int64_t>(local, options_.page_size); ++page) {
      pages[page] =
          static_cast<int32_t>(batch.table.slot(batch.request_rows[i], page * wide) / wide);
    }
    for (int32_t t = batch.q_indptr[i]; t < batch.q_indptr[i + 1]; ++t) {
      row_of_token_[static_cast<size_t>(t)] = request;
    }
  }

  BatchView local_batch(int32_t tokens) const {
    BatchView batch;
    batch.mode = tokens > 0 ? ForwardMode::decode : ForwardMode::idle;
    batch.requests = batch.tokens = tokens;
    batch.q_indptr = indptr_;
    batch.kv_lens = visible_;
    batch.request_rows = row_of_token_;
    batch.table = {.entries = pages_.data(),
                   .stride = pages_of_row_,
                   .entry_tokens = options_.page_size,
                   .rows = limits_.max_requests};
    batch.out_slots = slots_;
    return batch;
  }

  std::unique_ptr<AttentionBackend> local_;
  const ContextBackendOptions options_;
  Communicator& ranks_;
  ThreadPool& threads_;
  const std::string name_;
  BatchLimits limits_;
  std::unique_ptr<ContextExchange> exchange_;
  int32_t pages_of_row_ = 0, tokens_ = -1;  // tokens of the planned batch; -1: there is none
  // The rank's batch: a request for each new token.
  std::vector<int32_t> indptr_, visible_, row_of_token_, pages_;
  std::vector<int64_t> slots_;
  std::vector<char> q_, out_;  // rows of all heads
  std::vector<float> lse_;
};

}  // namespace

BatchLimits local_limits(const ContextShards& shards, const BatchLimits& limits,
                         DeviceKind device) {
  BatchLimits local = limits;
  if (device == DeviceKind::cuda && shards.interleave == 1) {
    local.max_requests *= shards.ranks;
    local.max_q_len = ceil_div(limits.max_q_len, shards.ranks);
  } else {
    local.max_requests = std::max({limits.max_requests, limits.max_tokens, 1});
    local.max_q_len = 1;
  }
  // Rank 0 has the most tokens of a request.
  local.max_kv_len = std::max(1, static_cast<int32_t>(shards.local_length(limits.max_kv_len, 0)));
  local.prefix_levels = 0;
  return local;
}

std::unique_ptr<AttentionBackend> make_context_backend(std::unique_ptr<AttentionBackend> local,
                                                       const ContextBackendOptions& options,
                                                       Communicator& ranks, ThreadPool& threads) {
  check_context_options(options, local.get(), ranks.size());
  if (local->device().kind == DeviceKind::cpu) {
    return std::make_unique<ContextBackend>(std::move(local), options, ranks, threads);
  }
  auto links = std::make_unique<ContextLinks>(ranks, local->device().index);
  ContextLinks& own = *links;
  return make_cuda_context_backend(std::move(local), options, own, std::move(links));
}

}  // namespace fovea
