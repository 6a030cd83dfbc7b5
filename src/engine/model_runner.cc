// SPDX-License-Identifier: Apache-2.0
#include "engine/model_runner.h"

#include <algorithm>
#include <array>
#include <deque>
#include <optional>
#include <utility>

#include "core/check.h"
#include "engine/cuda_model_runner.h"
#include "engine/pass_arrays.h"
#include "engine/reserved_model.h"
#include "engine/sampler.h"
#include "engine/shared_prefixes.h"

namespace fovea {
namespace {

// A pass runs when it is enqueued. With `draws`, it draws its tokens at once, and the next pass may
// take them before the caller has seen them.
class HostModelRunner final : public ModelRunner {
 public:
  HostModelRunner(ReservedModel model, CacheSet& caches, const SharedPrefixes& prefixes,
                  const ModelRunnerOptions& options);
  void enqueue(std::span<const PassPart> parts) override;
  void draw_masked(std::span<const grammar::TokenMask> masks) override;
  PassTimes collect(std::span<float> logits, std::span<int32_t> drawn) override;
  void abandon() override { passes_.clear(); }
  bool draws() const override { return sampler_.has_value(); }
  DrawnLists drawn_lists() const override { return drawn_; }
  RunnerStats stats() const override { return {.memory = memory_, .shared_steps = shared_steps_}; }

 private:
  // A draw that waits for its mask.
  struct MaskedDraw {
    SamplingParams sampling;
    size_t row = 0, draw = 0;
    uint64_t position = 0;
  };
  struct PassResult {
    PassTimes times;
    std::vector<int32_t> drawn;
    std::vector<MaskedDraw> masked;
    size_t place = 0;  // place of its logits
  };

  BatchView batch(const PassSize& size) const;
  void take_drawn_tokens(std::span<const PassPart> parts);
  void draw(std::span<const PassPart> parts, int32_t logit_rows, PassResult& result);
  void draw_token(const MaskedDraw& wanted, std::span<const uint64_t> allowed, PassResult& result);

  ReservedModel model_;
  CacheSet& caches_;
  SharedPrefixes prefixes_;
  EngineMemory memory_;
  int64_t shared_steps_ = 0;
  BatchLimits limits_;
  std::deque<PassResult> passes_;   // in flight
  std::optional<Sampler> sampler_;  // set if this object draws tokens
  // If this object draws tokens: the logits of two passes, because those of a pass in flight must
  // survive an enqueue() that fails.
  std::array<std::vector<float>, 2> logits_;
  std::vector<int32_t> list_memory_;  // [drawn_lists, max_tokens]
  DrawnLists drawn_;
  int32_t *own_list_, *other_list_;
  // Arrays of the batch, with room for the limits. Each pass fills their beginning.
  std::vector<int32_t> tokens_, positions_, logit_rows_, features_, places_, snapshot_slots_;
  std::vector<uint64_t> ancestors_;
  std::vector<int64_t> out_slots_;
  std::vector<int32_t> q_indptr_, kv_lens_, rows_, draft_counts_, state_slots_, shared_prefix_;
};

HostModelRunner::HostModelRunner(ReservedModel model, CacheSet& caches,
                                 const SharedPrefixes& prefixes, const ModelRunnerOptions& options)
    : model_(std::move(model)),
      caches_(caches),
      prefixes_(prefixes),
      memory_(model_.memory()),
      limits_(options.limits),
      list_memory_(static_cast<size_t>(options.drawn_lists) *
                   static_cast<size_t>(limits_.max_tokens)),
      drawn_(options.drawn) {
  if (options.drawn_lists > 0) drawn_ = {list_memory_.data(), nullptr};
  if (options.drawn_lists > 1) drawn_.drafter = drawn_.model + limits_.max_tokens;
  own_list_ = options.drawn_lists > 0 ? drawn_.model : drawn_.drafter;
  other_list_ = options.drawn_lists > 0 ? drawn_.drafter : drawn_.model;
  memory_.batch = host_batch_bytes(limits_);
  if (options.host_draws) sampler_.emplace(model_.model().info().vocabulary);
  const auto tokens = static_cast<size_t>(limits_.max_tokens);
  const auto requests = static_cast<size_t>(limits_.max_requests);
  for (std::vector<int32_t>* array :
       {&tokens_, &positions_, &logit_rows_, &features_, &places_, &snapshot_slots_}) {
    array->resize(tokens);
  }
  ancestors_.resize(tokens);
  out_slots_.resize(tokens);
  q_indptr_.resize(requests + 1);
  for (std::vector<int32_t>* array :
       {&kv_lens_, &rows_, &draft_counts_, &state_slots_, &shared_prefix_}) {
    array->resize(requests);
  }
}

void HostModelRunner::enqueue(std::span<const PassPart> parts) {
  for (const PassResult& pass : passes_) {
    check_argument(pass.masked.empty(), "{} draws of a pass in flight wait for masks",
                   pass.masked.size());
  }
  PassResult result;
  result.place = passes_.empty() ? 0 : 1 - passes_.back().place;
  result.times.begin = std::chrono::steady_clock::now();
  result.drawn.assign(static_cast<size_t>(count_draws(parts)), -1);
  const PassSize size =
      fill_arrays(parts, limits_, caches_.table(),
                  {tokens_.data(), positions_.data(), logit_rows_.data(), features_.data(),
                   places_.data(), ancestors_.data(), out_slots_.data(), snapshot_slots_.data(),
                   q_indptr_.data(), kv_lens_.data(), rows_.data(), draft_counts_.data()});
  take_drawn_tokens(parts);
  for (size_t i = 0; i < parts.size(); ++i) state_slots_[i] = parts[i].lease->state_slot;
  BatchView view = batch(size);
  if (prefixes_.find(parts, caches_.table(), shared_prefix_)) {
    view.hints.shared_prefix = shared_prefix_;
    ++shared_steps_;
  }
  const auto tokens = static_cast<size_t>(size.tokens);
  model_.forward(view, {{tokens_.data(), tokens},
                        {positions_.data(), tokens},
                        {logit_rows_.data(), static_cast<size_t>(size.logit_rows)},
                        {out_slots_.data(), tokens},
                        {features_.data(), tokens}});
  if (draws()) draw(parts, size.logit_rows, result);
  if (draws()) std::ranges::copy(result.drawn, own_list_);
  result.times.end = std::chrono::steady_clock::now();
  passes_.push_back(std::move(result));
}

void HostModelRunner::take_drawn_tokens(std::span<const PassPart> parts) {
  for (size_t i = 0; i < parts.size(); ++i) {
    const PassPart& part = parts[i];
    // A failed draw ends its request, or its drafts; until then its pass computes any token.
    int32_t* const end = tokens_.data() + q_indptr_[i + 1];
    if (part.drawn_by >= 0) end[-1] = std::max(own_list_[part.drawn_by], 0);
    for (int32_t k = 0; k < part.taken; ++k) {
      end[k - part.taken] = std::max(other_list_[part.taken_from + k], 0);
    }
  }
}

void HostModelRunner::draw(std::span<const PassPart> parts, int32_t logit_rows,
                           PassResult& result) {
  const auto width = static_cast<size_t>(model_.model().info().vocabulary);
  std::vector<float>& logits = logits_[result.place];
  logits.resize(static_cast<size_t>(logit_rows) * width);
  model_.model().logits(0, logits);
  size_t row = 0, next = 0;
  for (const PassPart& part : parts) {
    const size_t first = std::exchange(row, row + static_cast<size_t>(part.logit_rows));
    if (part.sampling == nullptr) {
      ++next;
      continue;
    }
    for (int32_t i = 0; i < part.logit_rows; ++i) {
      MaskedDraw wanted{*part.sampling, first + static_cast<size_t>(i), next++,
                        static_cast<uint64_t>(part.drawn_position(i))};
      if (part.masked) {
        result.masked.push_back(std::move(wanted));
      } else {
        draw_token(wanted, {}, result);
      }
    }
  }
}

void HostModelRunner::draw_token(const MaskedDraw& wanted, std::span<const uint64_t> allowed,
                                 PassResult& result) {
  const auto width = static_cast<size_t>(model_.model().info().vocabulary);
  const auto own = std::span(logits_[result.place]).subspan(wanted.row * width, width);
  try {
    result.drawn[wanted.draw] =
        sampler_->sample_allowed(own, wanted.sampling, wanted.position, allowed);
  } catch (const Error&) {  // the logits are no distribution
  }
}

void HostModelRunner::draw_masked(std::span<const grammar::TokenMask> masks) {
  check_masks(passes_.size(), masks.size(), passes_.empty() ? 0 : passes_.back().masked.size());
  PassResult& pass = passes_.back();
  for (size_t i = 0; i < masks.size(); ++i) draw_token(pass.masked[i], masks[i], pass);
  pass.masked.clear();
  std::ranges::copy(pass.drawn, own_list_);
}

PassTimes HostModelRunner::collect(std::span<float> logits, std::span<int32_t> drawn) {
  check_argument(!passes_.empty(), "no pass was enqueued");
  PassResult& pass = passes_.front();
  check_argument(drawn.size() == pass.drawn.size(), "drawn holds {}, must hold {} draws",
                 drawn.size(), pass.drawn.size());
  check_argument(pass.masked.empty(), "{} draws of a pass in flight wait for masks",
                 pass.masked.size());
  std::ranges::copy(pass.drawn, drawn.begin());
  if (!draws()) {
    const auto begin = std::chrono::steady_clock::now();
    model_.model().logits(0, logits);
    pass.times.end += std::chrono::steady_clock::now() - begin;
  } else if (!logits.empty()) {
    const std::vector<float>& own = logits_[pass.place];
    check_argument(passes_.size() == 1 && logits.size() == own.size(),
                   "logits holds {} floats, must hold {} of the last pass", logits.size(),
                   own.size());
    std::ranges::copy(own, logits.begin());
  }
  const PassTimes times = pass.times;
  passes_.pop_front();
  return times;
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
  if (size.snapshots) view.linear.snapshot_slots = snapshot_slots_;
  if (size.kept_drafts) view.linear.draft_counts = draft_counts_;
  if (size.trees) {
    view.positions = positions_;
    view.masks.tree.ancestors = ancestors_;
  }
  return view;
}

}  // namespace

void ModelRunner::check_masks(size_t passes, size_t masks, size_t draws) {
  check_argument(passes == 1, "{} passes are in flight, must be 1", passes);
  check_argument(draws > 0, "no draw of the pass waits for a mask");
  check_argument(masks == draws, "masks holds {}, must hold {} of the draws that wait", masks,
                 draws);
}

PassTimes ModelRunner::run(std::span<const PassPart> parts, std::span<float> logits,
                           std::span<int32_t> drawn) {
  enqueue(parts);
  return collect(logits, drawn);
}

size_t host_batch_bytes(const BatchLimits& limits) {
  const auto requests = static_cast<size_t>(limits.max_requests);
  const auto tokens = static_cast<size_t>(limits.max_tokens);
  const size_t table = (requests + 1) * static_cast<size_t>(limits.max_kv_len) * sizeof(int32_t);
  return table + tokens * (6 * sizeof(int32_t) + 2 * sizeof(int64_t)) +
         (6 * requests + 1) * sizeof(int32_t);
}

std::unique_ptr<ModelRunner> make_model_runner(Model& model, CacheSet& caches, ThreadPool& threads,
                                               const std::vector<GroupSelection>& selections,
                                               const ModelRunnerOptions& options) {
  ReservedModel reserved(model, caches, threads, selections, options.limits);
  const SharedPrefixes prefixes(selections, options.limits);
  if (model.device().kind() == DeviceKind::cuda) {
    return make_cuda_model_runner(std::move(reserved), caches, prefixes, options);
  }
  return std::make_unique<HostModelRunner>(std::move(reserved), caches, prefixes, options);
}

}  // namespace fovea
