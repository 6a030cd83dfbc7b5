// SPDX-License-Identifier: Apache-2.0
#include "engine/model_runner.h"

#include <algorithm>

#include "engine/shared_prefixes.h"

namespace fovea {
namespace {

class HostModelRunner final : public ModelRunner {
 public:
  HostModelRunner(ReservedModel model, CacheSet& caches, const SharedPrefixes& prefixes,
                  const BatchLimits& limits);
  void run(std::span<const PassPart> parts, std::span<float> logits,
           std::span<int32_t> drawn) override;
  RunnerStats stats() const override { return {.memory = memory_, .shared_steps = shared_steps_}; }

 private:
  void add(const PassPart& part);
  BatchView batch() const;

  ReservedModel model_;
  CacheSet& caches_;
  SharedPrefixes prefixes_;
  EngineMemory memory_;
  int64_t shared_steps_ = 0;
  // Arrays of the batch. Each pass rebuilds them within their initial capacity.
  std::vector<int32_t> tokens_, positions_, logit_rows_;
  std::vector<int64_t> out_slots_;
  std::vector<int32_t> q_indptr_, kv_lens_, rows_, state_slots_, shared_prefix_;
  int32_t max_q_len_ = 0, max_kv_len_ = 0, decodes_ = 0;
};

HostModelRunner::HostModelRunner(ReservedModel model, CacheSet& caches,
                                 const SharedPrefixes& prefixes, const BatchLimits& limits)
    : model_(std::move(model)), caches_(caches), prefixes_(prefixes), memory_(model_.memory()) {
  memory_.batch = host_batch_bytes(limits);
  const auto tokens = static_cast<size_t>(limits.max_tokens);
  const auto requests = static_cast<size_t>(limits.max_requests);
  tokens_.reserve(tokens);
  positions_.reserve(tokens);
  logit_rows_.reserve(tokens);
  out_slots_.reserve(tokens);
  q_indptr_.reserve(requests + 1);
  kv_lens_.reserve(requests);
  rows_.reserve(requests);
  state_slots_.reserve(requests);
  shared_prefix_.reserve(requests);
}

void HostModelRunner::run(std::span<const PassPart> parts, std::span<float> logits,
                          std::span<int32_t> drawn) {
  std::ranges::fill(drawn, -1);
  for (std::vector<int32_t>* array :
       {&tokens_, &positions_, &logit_rows_, &kv_lens_, &rows_, &state_slots_})
    array->clear();
  out_slots_.clear();
  q_indptr_.assign(1, 0);
  max_q_len_ = max_kv_len_ = decodes_ = 0;
  for (const PassPart& part : parts) add(part);
  BatchView view = batch();
  shared_prefix_.resize(parts.size());
  if (prefixes_.find(parts, caches_.table(), shared_prefix_)) {
    view.shared_prefix = shared_prefix_.data();
    ++shared_steps_;
  }
  model_.forward(view, {tokens_, positions_, logit_rows_});
  model_.model().logits(0, logits);
}

void HostModelRunner::add(const PassPart& part) {
  const auto count = static_cast<int32_t>(part.tokens.size());
  const std::span<const int32_t> slots = caches_.table().row(part.lease->row);
  tokens_.insert(tokens_.end(), part.tokens.begin(), part.tokens.end());
  for (int32_t position = part.begin; position < part.begin + count; ++position) {
    positions_.push_back(position);
    out_slots_.push_back(slots[static_cast<size_t>(position)]);
  }
  const auto end = static_cast<int32_t>(tokens_.size());
  for (int32_t row = end - part.logit_rows; row < end; ++row) logit_rows_.push_back(row);
  q_indptr_.push_back(end);
  kv_lens_.push_back(part.begin + count);
  rows_.push_back(part.lease->row);
  state_slots_.push_back(part.lease->state_slot);
  max_q_len_ = std::max(max_q_len_, count);
  max_kv_len_ = std::max(max_kv_len_, part.begin + count);
  decodes_ += count == 1;
}

BatchView HostModelRunner::batch() const {
  BatchView view;
  view.requests = static_cast<int32_t>(kv_lens_.size());
  view.tokens = static_cast<int32_t>(tokens_.size());
  view.mode = decodes_ == view.requests ? ForwardMode::decode
              : decodes_ == 0           ? ForwardMode::extend
                                        : ForwardMode::mixed;
  view.max_q_len = max_q_len_;
  view.max_kv_len = max_kv_len_;
  view.q_indptr = q_indptr_.data();
  view.kv_lens = kv_lens_.data();
  view.request_rows = rows_.data();
  view.table_rows = caches_.table().max_requests();
  view.request_slots = caches_.table().data();
  view.request_slots_stride = caches_.table().row_stride();
  view.out_slots = out_slots_.data();
  view.state_slots = state_slots_.data();
  return view;
}

}  // namespace

ReservedModel::ReservedModel(Model& model, CacheSet& caches, ThreadPool& threads,
                             const std::vector<GroupSelection>& selections,
                             const BatchLimits& limits)
    : model_(model) {
  for (size_t g = 0; g < selections.size(); ++g) {
    BackendContext context{selections[g].request.spec, caches.kv(g), caches.state(g), &threads};
    context.device = selections[g].request.device.device();
    backends_.push_back(create_group_backend(selections[g], context));
    backend_pointers_.push_back(backends_.back().get());
    memory_.attention += backends_.back()->workspace_bytes(limits);
  }
  model.reserve(limits.max_tokens, limits.max_kv_len);
  memory_.activations = model.activation_bytes(limits.max_tokens);
  memory_.positions = model.position_bytes(limits.max_kv_len);
  memory_.products = model.device().product_bytes();
}

size_t host_batch_bytes(const BatchLimits& limits) {
  const auto requests = static_cast<size_t>(limits.max_requests);
  const auto tokens = static_cast<size_t>(limits.max_tokens);
  const size_t table = (requests + 1) * static_cast<size_t>(limits.max_kv_len) * sizeof(int32_t);
  return table + tokens * (3 * sizeof(int32_t) + sizeof(int64_t)) +
         (5 * requests + 1) * sizeof(int32_t);
}

void ReservedModel::forward(const BatchView& batch, const ModelInputs& inputs) {
  const Stream stream = model_.device().stream();
  for (AttentionBackend* backend : backend_pointers_) backend->plan(batch, stream);
  model_.forward(inputs, backend_pointers_);
}

std::unique_ptr<ModelRunner> make_model_runner(Model& model, CacheSet& caches, ThreadPool& threads,
                                               const std::vector<GroupSelection>& selections,
                                               const ModelRunnerOptions& options) {
  ReservedModel reserved(model, caches, threads, selections, options.limits);
  const SharedPrefixes prefixes(selections, options.limits);
  if (model.device().kind() == DeviceKind::cuda) {
    return make_cuda_model_runner(std::move(reserved), caches, prefixes, options);
  }
  return std::make_unique<HostModelRunner>(std::move(reserved), caches, prefixes, options.limits);
}

}  // namespace fovea
