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

// A step computes the request's last token, and before it the last draft if all were accepted.
constexpr int32_t kMaxWidth = 2;
// A token that a pass in flight draws.
constexpr int32_t kUnknownToken = 0;

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
  int32_t begin = 0;      // tokens in the caches when the step began
  int32_t wanted = 0;     // drafts
  int32_t pending = 0;    // drafts that passes in flight draw
  int32_t drawn_by = -1;  // with `pending`: its draw in the pass enqueued last
  bool ended = false;     // a draft could not be drawn
  int32_t computed() const { return static_cast<int32_t>(state->tokens.size()); }
  int32_t drafts() const { return static_cast<int32_t>(request->chain.size()) - 1 + pending; }
  // Returns the number of tokens, drafts included, whose continuation is the next draft.
  int32_t length() const { return request->length() + drafts(); }
  int32_t token(int32_t position) const {
    const int32_t first_draft = request->length();
    if (position < first_draft) return request->tokens[static_cast<size_t>(position)];
    const auto draft = static_cast<size_t>(position - first_draft) + 1;
    return draft < request->chain.size() ? request->chain[draft] : kUnknownToken;
  }
};

// A pass from its choice to its tokens.
struct DraftPass {
  std::vector<size_t> members;  // indices into the requests that get drafts
  std::vector<int32_t> counts;  // tokens of each
  std::vector<bool> draws;      // they include the last one before its next draft
  size_t logit_rows = 0;
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
  ModelDrafter(Model& model, SizedEngine sized, const EngineOptions& options, ThreadPool& threads,
               bool host_draws);
  void draft(std::span<Request* const> requests, int32_t max_drafts) override;
  void forget(int64_t request) override;
  void clear() override { caches_.clear(); }

 private:
  bool admit(const Request& request, DraftState& state);
  void begin(Request& request, int32_t max_drafts);
  bool choose(DraftPass& pass);
  void enqueue(DraftPass& pass);
  void collect(const DraftPass& pass, bool has_logits);
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
  DraftPass passes_[2];
  std::vector<int32_t> tokens_, drawn_;  // arrays of one pass
  std::vector<PassPart> parts_;
};

ModelDrafter::ModelDrafter(Model& model, SizedEngine sized, const EngineOptions& options,
                           ThreadPool& threads, bool host_draws)
    : model_(model),
      limits_(sized.limits),
      selections_(std::move(sized.selections)),
      caches_(std::move(sized.caches)),
      runner_(make_model_runner(model, caches_, threads, selections_,
                                {.limits = limits_,
                                 .max_graph_requests = options.max_graph_requests,
                                 .cuda_graphs = sized.cuda_graphs,
                                 .logit_rows = sized.logit_rows(),
                                 .host_draws = host_draws,
                                 .max_width = sized.max_width})),
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
    bool in_flight = false;
    for (size_t next = 0;; next ^= 1) {
      const bool more = choose(passes_[next]);
      if (more) enqueue(passes_[next]);
      if (in_flight) collect(passes_[next ^ 1], !more);
      if (!more) break;
      in_flight = runner_->draws();
      if (!in_flight) collect(passes_[next], true);
    }
  } catch (...) {
    runner_->abandon();
    for (const Drafting& drafting : active_) {
      if (drafting.state == nullptr) continue;
      std::vector<int32_t>& text = drafting.state->tokens;
      text.resize(std::min(text.size(), static_cast<size_t>(drafting.begin)));
    }
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
bool ModelDrafter::choose(DraftPass& pass) {
  pass.members.clear();
  pass.counts.clear();
  pass.draws.clear();
  pass.logit_rows = 0;
  int32_t left = limits_.max_tokens;
  for (size_t i = 0; i < active_.size(); ++i) {
    Drafting& drafting = active_[i];
    if (drafting.drafts() >= drafting.wanted || left == 0) continue;
    const int32_t count = std::min(left, drafting.length() - drafting.computed());
    // Keeps the window of the first token, to which the next step may return.
    if (!caches_.extend(drafting.state->lease, drafting.begin, drafting.computed() + count)) {
      drafting.wanted = 0;
      drafting.state = nullptr;
      forget(drafting.request->id);
      continue;
    }
    left -= count;
    const bool draws = drafting.computed() + count == drafting.length();
    pass.members.push_back(i);
    pass.counts.push_back(count);
    pass.draws.push_back(draws);
    pass.logit_rows += draws;
  }
  return !pass.members.empty();
}

void ModelDrafter::enqueue(DraftPass& pass) {
  tokens_.clear();
  for (size_t i = 0; i < pass.members.size(); ++i) {
    const Drafting& drafting = active_[pass.members[i]];
    for (int32_t k = 0; k < pass.counts[i]; ++k)
      tokens_.push_back(drafting.token(drafting.computed() + k));
  }
  parts_.clear();
  size_t first = 0;
  for (size_t i = 0; i < pass.members.size(); ++i) {
    const Drafting& drafting = active_[pass.members[i]];
    const auto count = static_cast<size_t>(pass.counts[i]);
    parts_.push_back({.tokens = std::span(tokens_).subspan(first, count),
                      .begin = drafting.computed(),
                      .lease = &drafting.state->lease,
                      .logit_rows = pass.draws[i] ? 1 : 0,
                      .sampling = pass.draws[i] ? &drafting.state->sampling : nullptr,
                      .drawn_by = drafting.pending > 0 ? drafting.drawn_by : -1});
    first += count;
  }
  runner_->enqueue(parts_);
  for (size_t i = 0; i < pass.members.size(); ++i) {
    Drafting& drafting = active_[pass.members[i]];
    const std::span<const int32_t> computed = parts_[i].tokens;
    drafting.state->tokens.insert(drafting.state->tokens.end(), computed.begin(), computed.end());
    drafting.pending += pass.draws[i];
    drafting.drawn_by = static_cast<int32_t>(i);
  }
}

// Waits for the pass. has_logits: it is the last one that was enqueued.
void ModelDrafter::collect(const DraftPass& pass, bool has_logits) {
  const auto width = static_cast<size_t>(model_.info().vocabulary);
  drawn_.assign(pass.members.size(), -1);
  const std::span<float> logits(logits_.get(), has_logits ? pass.logit_rows * width : 0);
  runner_->collect(logits, drawn_);
  size_t row = 0;
  for (size_t i = 0; i < pass.members.size(); ++i) {
    if (!pass.draws[i]) continue;
    const size_t own = row++;
    take_token(active_[pass.members[i]], drawn_[i],
               has_logits ? logits.subspan(own * width, width) : logits);
  }
}

// Appends a draft, and enters it in the text that a pass after it has computed. A draft without a
// token is the last one: its request gets no more.
void ModelDrafter::take_token(Drafting& drafting, int32_t drawn, std::span<const float> logits) {
  --drafting.pending;
  if (drafting.state == nullptr || drafting.ended) return;  // its memory was given back
  std::vector<int32_t>& text = drafting.state->tokens;
  const auto position =
      static_cast<size_t>(drafting.request->length()) + drafting.request->chain.size() - 1;
  try {
    if (drawn < 0 && !logits.empty()) {
      drawn = sampler_.sample(logits, drafting.state->sampling, position).token;
    }
  } catch (const Error&) {  // the logits are no distribution
  }
  if (drawn < 0) {
    drafting.ended = true;
    drafting.wanted = 0;
    text.resize(std::min(text.size(), position));
    return;
  }
  drafting.request->chain.push_back(drawn);
  if (text.size() > position) text[position] = drawn;
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

SizedEngine size_draft_model(const DraftModel& draft, const DeviceInfo& device) {
  SizedEngine sized = size_engine(draft.options, draft.model->info(), device, 0);
  sized.max_width = kMaxWidth;
  return sized;
}

std::unique_ptr<Drafter> make_model_drafter(const DraftModel& draft, SizedEngine sized,
                                            ThreadPool& threads, bool host_draws) {
  return std::make_unique<ModelDrafter>(*draft.model, std::move(sized), draft.options, threads,
                                        host_draws);
}

}  // namespace fovea
