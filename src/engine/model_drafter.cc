// SPDX-License-Identifier: Apache-2.0
#include "engine/model_drafter.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/check.h"
#include "engine/cache_set.h"
#include "engine/model_runner.h"
#include "engine/sampler.h"

namespace fovea {
namespace {

// A request as the draft model sees it.
struct DraftState {
  CacheLease lease;
  std::vector<int32_t> tokens;  // in the caches; rejected drafts among them are replaced
  SamplingParams sampling;      // the rules of draws alone, without log-probabilities
};

// A request that gets drafts in this step.
struct Drafting {
  Request* request = nullptr;
  DraftState* state = nullptr;
  int32_t begin = 0;   // tokens in the caches when the step began
  int32_t wanted = 0;  // drafts
  int32_t computed() const { return static_cast<int32_t>(state->tokens.size()); }
  int32_t drafts() const { return static_cast<int32_t>(request->chain.size()) - 1; }
  // Returns the number of tokens, drafts included, whose continuation is the next draft.
  int32_t length() const { return request->length() + drafts(); }
  int32_t token(int32_t position) const {
    const int32_t first_draft = request->length();
    return position < first_draft ? request->tokens[static_cast<size_t>(position)]
                                  : request->chain[static_cast<size_t>(position - first_draft) + 1];
  }
};

SamplingParams rules_of_draws(const SamplingParams& sampling) {
  SamplingParams rules;
  rules.temperature = sampling.temperature;
  rules.top_k = sampling.top_k;
  rules.top_p = sampling.top_p;
  rules.min_p = sampling.min_p;
  rules.seed = sampling.seed;
  return rules;
}

class ModelDrafter final : public Drafter {
 public:
  ModelDrafter(Model& model, SizedEngine sized, const EngineOptions& options, ThreadPool& threads);
  void draft(std::span<Request* const> requests, int32_t max_drafts) override;
  void forget(int64_t request) override;
  void clear() override { caches_.clear(); }

 private:
  bool admit(const Request& request, DraftState& state);
  void begin(Request& request, int32_t max_drafts);
  bool next_pass();
  void run_pass();
  void take_token(Drafting& drafting, int32_t drawn, std::span<const float> logits);

  Model& model_;
  BatchLimits limits_;
  std::vector<GroupSelection> selections_;
  CacheSet caches_;
  std::unique_ptr<ModelRunner> runner_;
  Sampler sampler_;
  std::unique_ptr<float[]> logits_;                 // [max_requests, vocabulary]
  std::unordered_map<int64_t, DraftState> states_;  // by the request's id
  std::vector<Drafting> active_;
  // The pass: indices into active_, its tokens one after the other, and its parts.
  std::vector<size_t> members_;
  std::vector<int32_t> tokens_, counts_, drawn_;
  std::vector<PassPart> parts_;
};

ModelDrafter::ModelDrafter(Model& model, SizedEngine sized, const EngineOptions& options,
                           ThreadPool& threads)
    : model_(model),
      limits_(sized.limits),
      selections_(std::move(sized.selections)),
      caches_(std::move(sized.caches)),
      runner_(make_model_runner(
          model, caches_, threads, selections_,
          {limits_, options.max_graph_requests, sized.cuda_graphs, limits_.max_requests})),
      sampler_(model.info().vocabulary),
      logits_(
          std::make_unique_for_overwrite<float[]>(static_cast<size_t>(limits_.max_requests) *
                                                  static_cast<size_t>(model.info().vocabulary))) {}

void ModelDrafter::forget(int64_t request) {
  const auto found = states_.find(request);
  if (found == states_.end()) return;
  caches_.release(found->second.lease);
  states_.erase(found);
}

void ModelDrafter::draft(std::span<Request* const> requests, int32_t max_drafts) {
  active_.clear();
  for (Request* const request : requests) begin(*request, max_drafts);
  try {
    while (next_pass()) run_pass();
  } catch (...) {
    runner_->abandon();
    throw;
  }
}

// Finds the part of the request's text that is in the caches already.
void ModelDrafter::begin(Request& request, int32_t max_drafts) {
  request.chain.assign(1, request.tokens.back());
  const int32_t room = limits_.max_kv_len - request.length();
  const int32_t wanted = std::min({max_drafts, request.max_drafts(), room});
  if (wanted <= 0) return;
  DraftState& state = states_[request.id];
  if (state.lease.row == 0 && !admit(request, state)) return;
  const auto same = std::ranges::mismatch(state.tokens, request.tokens).in1;
  // The last token is computed again if need be, because its logits give the first draft.
  const auto kept = std::min<int64_t>(same - state.tokens.begin(), request.length() - 1);
  state.tokens.resize(static_cast<size_t>(kept));
  active_.push_back({&request, &state, static_cast<int32_t>(kept), wanted});
}

bool ModelDrafter::admit(const Request& request, DraftState& state) {
  std::optional<CacheLease> lease = caches_.admit({request.tokens, request.salt}, true, 0);
  if (!lease) return false;
  state.lease = std::move(*lease);
  state.sampling = rules_of_draws(request.sampling);
  state.tokens.assign(request.tokens.begin(), request.tokens.begin() + state.lease.cached_tokens);
  return true;
}

// Chooses the tokens of the next pass: those of requests that lack drafts and are not computed yet,
// within the limit. Requests whose tokens find no memory give theirs back and get no more drafts.
// Returns false if there are none.
bool ModelDrafter::next_pass() {
  members_.clear();
  counts_.clear();
  int32_t left = limits_.max_tokens;
  for (size_t i = 0; i < active_.size(); ++i) {
    Drafting& drafting = active_[i];
    if (drafting.drafts() >= drafting.wanted || left == 0) continue;
    const int32_t count = std::min(left, drafting.length() - drafting.computed());
    // Keeps the window of the first token, to which the next step may return.
    if (!caches_.extend(drafting.state->lease, drafting.begin, drafting.computed() + count)) {
      drafting.wanted = 0;
      forget(drafting.request->id);
      continue;
    }
    left -= count;
    members_.push_back(i);
    counts_.push_back(count);
  }
  return !members_.empty();
}

void ModelDrafter::run_pass() {
  const auto width = static_cast<size_t>(model_.info().vocabulary);
  tokens_.clear();
  for (size_t i = 0; i < members_.size(); ++i) {
    const Drafting& drafting = active_[members_[i]];
    for (int32_t k = 0; k < counts_[i]; ++k)
      tokens_.push_back(drafting.token(drafting.computed() + k));
  }
  parts_.clear();
  size_t first = 0, rows = 0;
  for (size_t i = 0; i < members_.size(); ++i) {
    const Drafting& drafting = active_[members_[i]];
    const auto count = static_cast<size_t>(counts_[i]);
    const bool ends = drafting.computed() + counts_[i] == drafting.length();
    parts_.push_back({.tokens = std::span(tokens_).subspan(first, count),
                      .begin = drafting.computed(),
                      .lease = &drafting.state->lease,
                      .logit_rows = ends ? 1 : 0,
                      .sampling = ends ? &drafting.state->sampling : nullptr});
    first += count;
    rows += ends;
  }
  drawn_.assign(parts_.size(), -1);
  runner_->run(parts_, {logits_.get(), rows * width}, drawn_);
  size_t row = 0;
  for (size_t i = 0; i < members_.size(); ++i) {
    Drafting& drafting = active_[members_[i]];
    const std::span<const int32_t> computed = parts_[i].tokens;
    drafting.state->tokens.insert(drafting.state->tokens.end(), computed.begin(), computed.end());
    if (parts_[i].logit_rows == 0) continue;
    take_token(drafting, drawn_[i], {logits_.get() + row++ * width, width});
  }
}

void ModelDrafter::take_token(Drafting& drafting, int32_t drawn, std::span<const float> logits) {
  const auto position = static_cast<uint64_t>(drafting.computed());
  try {
    if (drawn < 0) drawn = sampler_.sample(logits, drafting.state->sampling, position).token;
  } catch (const Error&) {  // the logits are no distribution
    drafting.wanted = 0;
    return;
  }
  drafting.request->chain.push_back(drawn);
}

}  // namespace

bool has_draft_model(const EngineOptions& options) {
  return options.speculate.starts_with(kDraftPrefix);
}

DraftModel load_draft_model(const EngineOptions& options, std::shared_ptr<ModelDevice> device,
                            ThreadPool& threads) {
  DraftModel draft{nullptr, options};
  draft.options.model_path = options.speculate.substr(kDraftPrefix.size());
  draft.options.speculate.clear();
  draft.options.always_speculate = false;
  draft.options.backend = {};
  draft.options.decode_backend.reset();
  draft.model = load_model_of(draft.options, std::move(device), threads);
  const ModelInfo& info = draft.model->info();
  const bool has_states = std::ranges::any_of(
      info.groups, [](const LayerGroup& group) { return is_linear(group.spec.kind); });
  if (has_states) {
    fail(ErrorCode::unsupported,
         "speculate: the draft model {} has recurrent states, which cannot forget rejected drafts",
         info.architecture);
  }
  return draft;
}

void divide_budget(const ModelInfo& model, size_t free_bytes, EngineOptions& options,
                   DraftModel& draft) {
  const ModelInfo& info = draft.model->info();
  check_argument(model.vocabulary == info.vocabulary,
                 "speculate: the draft model has a vocabulary of {} tokens, the model of {}",
                 info.vocabulary, model.vocabulary);
  const auto page_bytes = [](const ModelInfo& of, const EngineOptions& given) {
    double bytes = 0;
    for (const CacheGroup& group : cache_groups(of, given))
      if (group.kv) bytes += static_cast<double>(kv_pool_bytes(*group.kv, 1));
    return bytes;
  };
  const double own = page_bytes(model, options), other = page_bytes(info, draft.options);
  const size_t budget = options.kv_memory_bytes > 0 ? options.kv_memory_bytes : free_bytes / 2;
  draft.options.kv_memory_bytes =
      static_cast<size_t>(static_cast<double>(budget) * (other / (own + other)));
  options.kv_memory_bytes = budget - draft.options.kv_memory_bytes;
  draft.options.max_context = std::min(options.max_context, info.max_context);
}

std::unique_ptr<Drafter> make_model_drafter(const DraftModel& draft, SizedEngine sized,
                                            ThreadPool& threads) {
  return std::make_unique<ModelDrafter>(*draft.model, std::move(sized), draft.options, threads);
}

}  // namespace fovea
