// SPDX-License-Identifier: Apache-2.0
#include "engine/model_runner.h"

#include <algorithm>

#include "engine/cuda_model_runner.h"
#include "engine/pass_arrays.h"
#include "engine/reserved_model.h"
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
  BatchView batch(const PassSize& size) const;

  ReservedModel model_;
  CacheSet& caches_;
  SharedPrefixes prefixes_;
  EngineMemory memory_;
  int64_t shared_steps_ = 0;
  BatchLimits limits_;
  // Arrays of the batch, with room for the limits. Each pass fills their beginning.
  std::vector<int32_t> tokens_, positions_, logit_rows_;
  std::vector<int64_t> out_slots_;
  std::vector<int32_t> q_indptr_, kv_lens_, rows_, state_slots_, shared_prefix_;
};

HostModelRunner::HostModelRunner(ReservedModel model, CacheSet& caches,
                                 const SharedPrefixes& prefixes, const BatchLimits& limits)
    : model_(std::move(model)),
      caches_(caches),
      prefixes_(prefixes),
      memory_(model_.memory()),
      limits_(limits) {
  memory_.batch = host_batch_bytes(limits);
  const auto tokens = static_cast<size_t>(limits.max_tokens);
  const auto requests = static_cast<size_t>(limits.max_requests);
  for (std::vector<int32_t>* array : {&tokens_, &positions_, &logit_rows_}) array->resize(tokens);
  out_slots_.resize(tokens);
  q_indptr_.resize(requests + 1);
  for (std::vector<int32_t>* array : {&kv_lens_, &rows_, &state_slots_, &shared_prefix_}) {
    array->resize(requests);
  }
}

void HostModelRunner::run(std::span<const PassPart> parts, std::span<float> logits,
                          std::span<int32_t> drawn) {
  std::ranges::fill(drawn, -1);
  const PassSize size =
      fill_arrays(parts, limits_, caches_.table(),
                  {tokens_.data(), positions_.data(), logit_rows_.data(), out_slots_.data(),
                   q_indptr_.data(), kv_lens_.data(), rows_.data()});
  for (size_t i = 0; i < parts.size(); ++i) state_slots_[i] = parts[i].lease->state_slot;
  BatchView view = batch(size);
  if (prefixes_.find(parts, caches_.table(), shared_prefix_)) {
    view.hints.shared_prefix = shared_prefix_;
    ++shared_steps_;
  }
  const auto tokens = static_cast<size_t>(size.tokens);
  model_.forward(view, {{tokens_.data(), tokens},
                        {positions_.data(), tokens},
                        {logit_rows_.data(), static_cast<size_t>(size.logit_rows)}});
  model_.model().logits(0, logits);
}

BatchView HostModelRunner::batch(const PassSize& size) const {
  BatchView view;
  view.mode = size.mode;
  view.requests = size.requests;
  view.tokens = size.tokens;
  view.hints.max_q_len = size.max_q_len;
  view.hints.max_kv_len = size.max_kv_len;
  view.q_indptr = q_indptr_;
  view.kv_lens = kv_lens_;
  view.request_rows = rows_;
  view.table = caches_.table().table();
  view.out_slots = out_slots_;
  view.linear.state_slots = state_slots_;
  return view;
}

}  // namespace

size_t host_batch_bytes(const BatchLimits& limits) {
  const auto requests = static_cast<size_t>(limits.max_requests);
  const auto tokens = static_cast<size_t>(limits.max_tokens);
  const size_t table = (requests + 1) * static_cast<size_t>(limits.max_kv_len) * sizeof(int32_t);
  return table + tokens * (3 * sizeof(int32_t) + sizeof(int64_t)) +
         (5 * requests + 1) * sizeof(int32_t);
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
