// SPDX-License-Identifier: Apache-2.0
#include "engine/model_drafter.h"

#include <algorithm>
#include <new>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/check.h"
#include "engine/cache_set.h"
#include "engine/model_runner.h"
#include "engine/sampler.h"

namespace fovea {
namespace {

// A token that a pass in flight draws.
constexpr int32_t kUnknownToken = 0;

// A request as the draft model sees it. Token i of a head is token i + 1 of the text.
struct DraftState {
  CacheLease lease;
  std::vector<int32_t> tokens;  // in the caches; rejected drafts among them are replaced
  int32_t exact = 0;            // tokens of the text; a head computes drafts after them anew
  std::string salt;             // salt of its cached prefixes
  SamplingParams sampling;      // the rules of draws alone, without log-probabilities
};

// A request that gets drafts in this step.
struct Drafting {
  Request* request = nullptr;
  DraftState* state = nullptr;
  int32_t begin = 0;       // tokens in the caches when the step began
  int32_t wanted = 0;      // drafts
  int32_t pending = 0;     // drafts that passes in flight draw
  int32_t drawn_by = -1;   // with `pending`: its draw in the pass enqueued last
  bool ended = false;      // a draft could not be drawn
  int32_t skipped = 0;     // tokens of the text before the draft model's first one
  int32_t hidden_row = 0;  // row of a head's hidden state in the pass enqueued last
  int32_t computed() const { return static_cast<int32_t>(state->tokens.size()); }
  int32_t drafts() const { return static_cast<int32_t>(request->chain.size()) - 1 + pending; }
  // Returns the draft model's tokens of the text without drafts.
  int32_t text_length() const { return request->length() - skipped; }
  // Returns the number of its tokens, drafts included, whose continuation is the next draft.
  int32_t length() const { return text_length() + drafts(); }
  int32_t token(int32_t position) const {
    const int32_t first_draft = text_length();
    if (position < first_draft) return request->tokens[static_cast<size_t>(position + skipped)];
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
  ModelDrafter(const DraftModel& draft, SizedEngine sized, ThreadPool& threads, CacheSet& caches,
               bool host_draws);
  void draft(std::span<Request* const> requests, int32_t max_drafts) override;
  void forget(int64_t request) override;
  void clear() override { caches_.clear(); }

 private:
  bool admit(const Request& request, DraftState& state);
  void begin(Request& request, int32_t max_drafts);
  bool choose(DraftPass& pass);
  void enqueue(DraftPass& pass);
  void add_features(const Drafting& drafting, int32_t count);
  void collect(const DraftPass& pass, bool has_logits);
  void take_token(Drafting& drafting, int32_t drawn, std::span<const float> logits);

  Model& model_;
  const bool is_head_;
  CacheSet& target_;  // caches of the model that it drafts for
  BatchLimits limits_;
  std::vector<GroupSelection> selections_;
  CacheSet caches_;
  std::unique_ptr<ModelRunner> runner_;
  Sampler sampler_;
  std::unique_ptr<float[]> logits_;                 // [max_requests, vocabulary]
  std::unordered_map<int64_t, DraftState> states_;  // by the request's id
  std::vector<Drafting> active_;
  DraftPass passes_[2];
  std::vector<int32_t> tokens_, features_, drawn_;  // arrays of one pass
  std::vector<PassPart> parts_;
};

ModelDrafter::ModelDrafter(const DraftModel& draft, SizedEngine sized, ThreadPool& threads,
                           CacheSet& caches, bool host_draws)
    : model_(*draft.model),
      is_head_(draft.head != nullptr),
      target_(caches),
      limits_(sized.limits),
      selections_(std::move(sized.selections)),
      caches_(std::move(sized.caches)),
      runner_(make_model_runner(model_, caches_, threads, selections_,
                                {.limits = limits_,
                                 .max_graph_requests = draft.options.max_graph_requests,
                                 .cuda_graphs = sized.cuda_graphs,
                                 .logit_rows = sized.logit_rows(),
                                 .host_draws = host_draws,
                                 .max_width = sized.max_width,
                                 .captures_extends = sized.captures_extends})),
      sampler_(model_.info().vocabulary),
      logits_(
          std::make_unique_for_overwrite<float[]>(static_cast<size_t>(limits_.max_requests) *
                                                  static_cast<size_t>(model_.info().vocabulary))) {}

// Leaves the text to the prefix cache.
void ModelDrafter::forget(int64_t request) {
  const auto found = states_.find(request);
  if (found == states_.end()) return;
  DraftState& state = found->second;
  const size_t known = std::min(state.tokens.size(), static_cast<size_t>(state.exact));
  try {
    caches_.publish(state.lease, {std::span(state.tokens).first(known), state.salt});
  } catch (const std::bad_alloc&) {  // costs a later request time only
  }
  caches_.release(state.lease);
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
  const int32_t skipped = is_head_ ? 1 : 0;
  const int32_t length = request.length() - skipped;
  const int32_t room = limits_.max_kv_len - length;
  const int32_t wanted = std::min({max_drafts, request.max_drafts(), room});
  if (wanted <= 0 || length == 0) return;
  DraftState& state = states_[request.id];
  if (state.lease.row == 0 && !admit(request, state)) return;
  const auto text = std::span(request.tokens).subspan(static_cast<size_t>(skipped));
  const auto same = std::ranges::mismatch(state.tokens, text).in1;
  // The last token is computed again if need be, because its logits give the first draft.
  auto kept = std::min<int64_t>(same - state.tokens.begin(), length - 1);
  if (is_head_) kept = std::min<int64_t>(kept, state.exact);
  state.exact = length;
  state.tokens.resize(static_cast<size_t>(kept));
  active_.push_back({.request = &request,
                     .state = &state,
                     .begin = static_cast<int32_t>(kept),
                     .wanted = wanted,
                     .skipped = skipped});
}

bool ModelDrafter::admit(const Request& request, DraftState& state) {
  std::span<const int32_t> tokens = request.tokens;
  state.salt = request.salt;
  if (is_head_) {  // the token before its first one determines features, too
    state.salt.append(reinterpret_cast<const char*>(tokens.data()), sizeof(int32_t));
    tokens = tokens.subspan(1);
  }
  std::optional<CacheLease> lease = caches_.admit({tokens, state.salt}, true, 0);
  if (!lease) return false;
  state.lease = std::move(*lease);
  state.sampling = rules_of_draws(request.sampling);
  const auto cached = tokens.first(static_cast<size_t>(state.lease.cached_tokens));
  state.tokens.assign(cached.begin(), cached.end());
  state.exact = state.lease.cached_tokens;
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

// Adds the features of the request's next tokens: those that the model noted of its text, then the
// head's hidden state before a draft.
void ModelDrafter::add_features(const Drafting& drafting, int32_t count) {
  const std::span<const int32_t> slots = target_.table().row(drafting.request->lease.row);
  const auto hidden_states = static_cast<int32_t>(target_.slots());
  for (int32_t i = drafting.computed(); i < drafting.computed() + count; ++i) {
    features_.push_back(i < drafting.text_length() ? slots[static_cast<size_t>(i)]
                                                   : hidden_states + drafting.hidden_row);
  }
}

void ModelDrafter::enqueue(DraftPass& pass) {
  tokens_.clear();
  features_.clear();
  for (size_t i = 0; i < pass.members.size(); ++i) {
    const Drafting& drafting = active_[pass.members[i]];
    for (int32_t k = 0; k < pass.counts[i]; ++k)
      tokens_.push_back(drafting.token(drafting.computed() + k));
    if (is_head_) add_features(drafting, pass.counts[i]);
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
                      .drawn_by = drafting.pending > 0 ? drafting.drawn_by : -1,
                      .skipped = drafting.skipped});
    if (is_head_) parts_.back().features = std::span(features_).subspan(first, count);
    first += count;
  }
  runner_->enqueue(parts_);
  int32_t hidden_row = 0;
  for (size_t i = 0; i < pass.members.size(); ++i) {
    Drafting& drafting = active_[pass.members[i]];
    const std::span<const int32_t> computed = parts_[i].tokens;
    drafting.state->tokens.insert(drafting.state->tokens.end(), computed.begin(), computed.end());
    drafting.pending += pass.draws[i];
    if (pass.draws[i]) drafting.hidden_row = hidden_row++;
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
  const size_t drafts = drafting.request->chain.size() - 1;
  const auto position = static_cast<size_t>(drafting.request->length()) + drafts;
  const auto own_position = static_cast<size_t>(drafting.text_length()) + drafts;
  try {
    if (drawn < 0 && !logits.empty()) {
      drawn = sampler_.sample(logits, drafting.state->sampling, position).token;
    }
  } catch (const Error&) {  // the logits are no distribution
  }
  if (drawn < 0) {
    drafting.ended = true;
    drafting.wanted = 0;
    text.resize(std::min(text.size(), own_position));
    return;
  }
  drafting.request->chain.push_back(drawn);
  if (text.size() > own_position) text[own_position] = drawn;
}

}  // namespace

std::unique_ptr<Drafter> make_model_drafter(const DraftModel& draft, SizedEngine sized,
                                            ThreadPool& threads, CacheSet& caches,
                                            bool host_draws) {
  return std::make_unique<ModelDrafter>(draft, std::move(sized), threads, caches, host_draws);
}

}  // namespace fovea
