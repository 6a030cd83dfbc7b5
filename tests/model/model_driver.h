// SPDX-License-Identifier: Apache-2.0
// Drives a Model directly: one pool and one backend per layer group, page tables, plan, forward.
#pragma once

#include <algorithm>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "core/check.h"
#include "fovea/select_backend.h"
#include "model/model.h"

namespace fovea {

struct DriverOptions {
  std::string backend = "cpu";  // linear layers use `linear`
  DType kv_dtype = DType::f32;
  int32_t page_size = 16;
  int32_t max_requests = 8;
  int32_t max_tokens = 1024;  // per pass
  int32_t max_context = 1024;
  bool batch_invariant = false;
  void (*around_pass)(bool begins) = nullptr;  // called before plan and after forward
};

class ModelDriver {
 public:
  // New tokens of one request in one pass.
  struct Work {
    int32_t request = 0;
    std::span<const int32_t> tokens;
  };

  ModelDriver(const std::string& folder, const DriverOptions& options, ThreadPool& threads)
      : options_(options),
        model_(load_model(folder, threads)),
        registry_(BackendRegistry::builtin()),
        table_(options.max_requests + 1, options.max_context),
        pages_(1 + options.max_requests * pages_per_request(), options.page_size) {
    model_->reserve(options.max_tokens, std::min(options.max_context, info().max_context));
    for (const LayerGroup& group : model_->info().groups) add_group(group, threads);
    for (const auto& backend : backends_) backend_pointers_.push_back(backend.get());
  }

  const ModelInfo& info() const { return model_->info(); }

  int32_t open() {
    Request& request = requests_.emplace_back();
    request.row = table_.allocate().value();
    for (const auto& pool : state_pools_) request.state_slot = pool->allocate().value();
    return static_cast<int32_t>(requests_.size()) - 1;
  }

  void close(int32_t id) {
    Request& request = requests_[static_cast<size_t>(id)];
    pages_.release_slots(table_.row(request.row).first(static_cast<size_t>(request.length)));
    table_.release(request.row);
    for (const auto& pool : state_pools_) pool->release(request.state_slot);
    request = {};
  }

  // Runs one pass. Returns logits [rows, vocabulary] of every token or of each request's last
  // token.
  std::span<const float> run(std::span<const Work> work, bool all_rows) {
    Batch batch = grow(work);
    std::vector<int32_t> logit_rows;
    if (all_rows) {
      logit_rows.resize(batch.tokens.size());
      std::iota(logit_rows.begin(), logit_rows.end(), 0);
    } else {
      for (size_t i = 0; i < work.size(); ++i) logit_rows.push_back(batch.q_indptr[i + 1] - 1);
    }
    logits_.resize(logit_rows.size() * static_cast<size_t>(info().vocabulary));
    const BatchView view = view_of(batch);
    if (options_.around_pass != nullptr) options_.around_pass(true);
    for (AttentionBackend* backend : backend_pointers_) backend->plan(view);
    model_->forward({batch.tokens, batch.positions, logit_rows}, backend_pointers_, logits_);
    if (options_.around_pass != nullptr) options_.around_pass(false);
    return logits_;
  }

 private:
  struct Request {
    int32_t row = 0;
    int32_t state_slot = -1;
    int32_t length = 0;
  };
  struct Batch {
    std::vector<int32_t> tokens, positions, q_indptr{0}, kv_lens, rows, state_slots;
    std::vector<int64_t> out_slots;
  };

  int32_t pages_per_request() const {
    return (options_.max_context + options_.page_size - 1) / options_.page_size;
  }

  // KV pools of all groups share one numbering of slots; linear groups share one of states.
  void add_group(const LayerGroup& group, ThreadPool& threads) {
    const bool is_linear = group.state.layers > 0;
    BackendRequest request{.spec = group.spec, .cache = {}, .limits = {}, .device = cpu_device()};
    request.limits.max_requests = options_.max_requests;
    request.limits.max_tokens = options_.max_tokens;
    request.limits.max_q_len = options_.max_tokens;
    request.limits.max_kv_len = options_.max_context;
    request.spec.batch_invariant = options_.batch_invariant;
    BackendContext context;
    context.spec = request.spec;
    context.threads = &threads;
    if (is_linear) {
      state_pools_.push_back(make_state_pool(group.state, options_.max_requests + 1));
      context.state = state_pools_.back().get();
    } else {
      KvCacheSpec& cache = request.cache;
      cache.layout = group.spec.kind == AttentionKind::mla ? KvLayout::mla : KvLayout::mha;
      cache.dtype = options_.kv_dtype;
      cache.layers = static_cast<int32_t>(group.layers.size());
      cache.kv_heads = group.spec.kv_heads;
      cache.head_dim = cached_key_dim(group.spec);
      cache.head_dim_v = cached_value_dim(group.spec);
      cache.page_size = options_.page_size;
      kv_pools_.push_back(make_kv_pool(cache, pages_.pages()));
      context.kv = kv_pools_.back().get();
    }
    const bool is_simd_linear = is_linear && options_.backend == "cpu";
    const BackendWish wish{Policy::require, is_simd_linear ? "linear" : options_.backend};
    const Selection selection = select_backend(registry_, request, wish);
    backends_.push_back(selection.chosen->create(context));
    backends_.back()->reserve(request.limits);
  }

  Batch grow(std::span<const Work> work) {
    Batch batch;
    for (const Work& part : work) {
      Request& request = requests_[static_cast<size_t>(part.request)];
      const std::span<int32_t> row = table_.row(request.row);
      const int32_t begin = request.length;
      const int32_t end = begin + static_cast<int32_t>(part.tokens.size());
      const int64_t last = begin > 0 ? row[static_cast<size_t>(begin) - 1] : -1;
      const size_t first_slot = batch.out_slots.size();
      check_argument(pages_.extend(begin, end, last, batch.out_slots), "{} pages are too few",
                     pages_.pages());
      for (int32_t i = begin; i < end; ++i) {
        row[static_cast<size_t>(i)] =
            static_cast<int32_t>(batch.out_slots[first_slot + static_cast<size_t>(i - begin)]);
        batch.positions.push_back(i);
      }
      request.length = end;
      batch.tokens.insert(batch.tokens.end(), part.tokens.begin(), part.tokens.end());
      batch.q_indptr.push_back(static_cast<int32_t>(batch.tokens.size()));
      batch.kv_lens.push_back(end);
      batch.rows.push_back(request.row);
      batch.state_slots.push_back(request.state_slot);
    }
    return batch;
  }

  BatchView view_of(const Batch& batch) const {
    BatchView view;
    view.requests = static_cast<int32_t>(batch.rows.size());
    view.tokens = static_cast<int32_t>(batch.tokens.size());
    for (size_t i = 0; i < batch.rows.size(); ++i) {
      view.hints.max_q_len =
          std::max(view.hints.max_q_len, batch.q_indptr[i + 1] - batch.q_indptr[i]);
      view.hints.max_kv_len = std::max(view.hints.max_kv_len, batch.kv_lens[i]);
    }
    view.mode = view.hints.max_q_len == 1 ? ForwardMode::decode : ForwardMode::extend;
    view.q_indptr = batch.q_indptr;
    view.kv_lens = batch.kv_lens;
    view.request_rows = batch.rows;
    view.table = table_.table();
    view.out_slots = batch.out_slots;
    view.linear.state_slots = batch.state_slots;
    return view;
  }

  DriverOptions options_;
  std::unique_ptr<Model> model_;
  BackendRegistry registry_;
  RequestTable table_;
  PageAllocator pages_;
  std::vector<std::unique_ptr<KvPool>> kv_pools_;
  std::vector<std::unique_ptr<StatePool>> state_pools_;
  std::vector<std::unique_ptr<AttentionBackend>> backends_;
  std::vector<AttentionBackend*> backend_pointers_;
  std::vector<Request> requests_;
  std::vector<float> logits_;
};

}  // namespace fovea
