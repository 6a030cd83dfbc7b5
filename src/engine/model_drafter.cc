// SPDX-License-Identifier: Apache-2.0
#include "engine/model_drafter.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "core/check.h"
#include "engine/draft_states.h"
#include "engine/model_runner.h"
#include "engine/sampler.h"
#include "engine/tree_drafts.h"

namespace fovea {
namespace {

// A token that a pass in flight draws.
constexpr int32_t kUnknownToken = 0;

// A request's chain while it grows.
struct ChainDrafting : Drafting {
  int32_t pending = 0;     // drafts that passes in flight draw
  int32_t drawn_by = -1;   // with `pending`: its draw in the pass enqueued last
  bool ended = false;      // a draft could not be drawn
  int32_t hidden_row = 0;  // row of a head's hidden state in the pass enqueued last
  int32_t drafts() const { return request->drafts.drafts() + pending; }
  // Returns the number of its tokens, drafts included, whose continuation is the next draft.
  int32_t length() const { return text_length() + drafts(); }
  int32_t token(int32_t position) const {
    if (position < text_length()) return text_token(position);
    const std::vector<int32_t>& chain = request->drafts.tokens;
    const auto draft = static_cast<size_t>(position - text_length()) + 1;
    return draft < chain.size() ? chain[draft] : kUnknownToken;
  }
};

// A pass from its choice to its tokens.
struct DraftPass {
  std::vector<size_t> members;  // indices into the requests that get drafts
  std::vector<int32_t> counts;  // tokens of each
  std::vector<bool> draws;      // they include the last one before its next draft
  std::vector<int32_t> draw;    // its place among all draws
  size_t logit_rows = 0, all_draws = 0;

  void clear() {
    members.clear();
    counts.clear();
    draws.clear();
    draw.clear();
    logit_rows = all_draws = 0;
  }
};

// A request's part of a pass that begin_next() has enqueued: all tokens that may become its text,
// with a draft after each.
struct Begun {
  int64_t request = 0;
  int32_t begin = 0, count = 0;  // its first token, and the number of tokens
  int32_t first_draw = 0;
};

class ModelDrafter final : public Drafter {
 public:
  ModelDrafter(const DraftModel& draft, SizedEngine sized, ThreadPool& threads, CacheSet& caches,
               bool host_draws, const DrawnLists& drawn);
  void draft(std::span<Request* const> requests, int32_t max_drafts, int32_t branches) override;
  void finish() override;
  bool begins_next() const override { return states_.is_head() && runner_->draws(); }
  void begin_next(std::span<const DrawnText> texts) override;
  void abandon() override;
  double device_seconds() const override { return device_seconds_; }
  void forget(int64_t request) override { states_.forget(request); }
  void clear() override { states_.caches().clear(); }

 private:
  void draft_chains();
  void go_on(ChainDrafting& drafting) const;
  void take_begun();
  void leave(const DraftPass& pass);
  bool choose(DraftPass& pass);
  void enqueue(DraftPass& pass);
  void add_features(const ChainDrafting& drafting, int32_t count);
  void wait(const DraftPass& pass, std::span<float> logits);
  void collect(const DraftPass& pass, bool has_logits);
  void take_token(ChainDrafting& drafting, int32_t drawn, std::span<const float> logits);

  Model& model_;
  std::vector<GroupSelection> selections_;
  DraftStates states_;
  std::unique_ptr<ModelRunner> runner_;
  Sampler sampler_;
  std::unique_ptr<float[]> logits_;    // [max_requests, vocabulary]
  std::optional<TreeDrafts> trees_;    // with several branches
  std::vector<ChainDrafting> active_;  // requests that get chains
  std::vector<Drafting> growing_;      // requests that get trees
  DraftPass passes_[2];
  const DraftPass* left_ = nullptr;                 // in flight since draft()
  std::vector<Begun> begun_;                        // in flight since begin_next()
  std::vector<int32_t> tokens_, features_, drawn_;  // arrays of one pass
  std::vector<PassPart> parts_;
  double device_seconds_ = 0;
};

ModelDrafter::ModelDrafter(const DraftModel& draft, SizedEngine sized, ThreadPool& threads,
                           CacheSet& caches, bool host_draws, const DrawnLists& drawn)
    : model_(*draft.model),
      selections_(std::move(sized.selections)),
      states_(std::move(sized.caches), sized.limits, draft.head != nullptr, caches),
      runner_(make_model_runner(model_, states_.caches(), threads, selections_,
                                {.limits = sized.limits,
                                 .max_graph_requests = draft.options.max_graph_requests,
                                 .cuda_graphs = sized.cuda_graphs,
                                 .logit_rows = sized.logit_rows(),
                                 .host_draws = host_draws,
                                 .max_width = sized.max_width,
                                 .captures_extends = sized.captures_extends,
                                 .likeliest = sized.likeliest,
                                 .trees = draft.options.draft_branches > 1,
                                 .drawn_lists = sized.drawn_lists,
                                 .drawn = drawn})),
      sampler_(model_.info().vocabulary),
      logits_(
          std::make_unique_for_overwrite<float[]>(static_cast<size_t>(sized.limits.max_requests) *
                                                  static_cast<size_t>(model_.info().vocabulary))) {
  if (draft.options.draft_branches > 1) {
    trees_.emplace(states_, *runner_, model_.info().vocabulary,
                   runner_->finds_likeliest() ? 0 : sized.scheduling.logit_rows());
  }
}

void ModelDrafter::draft(std::span<Request* const> requests, int32_t max_drafts, int32_t branches) {
  active_.clear();
  growing_.clear();
  device_seconds_ = 0;
  try {
    for (Request* const request : requests) {
      const Drafting drafting = states_.begin(*request, max_drafts);
      if (drafting.wanted == 0) continue;
      branches > 1 ? growing_.push_back(drafting) : active_.push_back({drafting});
    }
    draft_chains();
    if (branches > 1) device_seconds_ = trees_->draft(growing_, branches);
  } catch (...) {
    abandon();
    throw;
  }
}

void ModelDrafter::abandon() {
  left_ = nullptr;
  begun_.clear();
  runner_->abandon();
  for (const Drafting& drafting : active_) DraftStates::undo(drafting);
  for (const Drafting& drafting : growing_) DraftStates::undo(drafting);
  active_.clear();
  growing_.clear();
}

// The tokens of all drafts that may be right are computed anew, which is what a head does anyway.
// The features of all of them are there when the pass ends that draws them.
void ModelDrafter::begin_next(std::span<const DrawnText> texts) {
  if (!begins_next()) return;
  std::vector<Begun> begun;
  features_.clear();
  parts_.clear();
  int32_t draws = 0;
  for (const DrawnText& text : texts) {
    const Drafting drafting = states_.go_on(*text.request, text.draws);
    if (drafting.state == nullptr) continue;
    begun.push_back({text.request->id, drafting.begin, text.draws, draws});
    for (int32_t i = 0; i < text.draws; ++i) {
      features_.push_back(states_.features_of(drafting, drafting.begin + i));
    }
    parts_.push_back({.begin = drafting.begin,
                      .lease = &drafting.state->lease,
                      .logit_rows = text.draws,
                      .sampling = &drafting.state->sampling,
                      .taken_from = text.first_draw,
                      .taken = text.draws,
                      .skipped = drafting.skipped});
    draws += text.draws;
  }
  if (begun.empty()) return;
  tokens_.assign(features_.size(), kUnknownToken);
  for (size_t i = 0; i < parts_.size(); ++i) {
    const auto first = static_cast<size_t>(begun[i].first_draw);
    const auto count = static_cast<size_t>(begun[i].count);
    parts_[i].tokens = std::span(tokens_).subspan(first, count);
    parts_[i].features = std::span(features_).subspan(first, count);
  }
  runner_->enqueue(parts_);
  begun_ = std::move(begun);
}

// Makes the pass that begin_next() has enqueued the one before the next pass of chains. Requests
// that go on with a draft of it come first: their hidden states are those of the pass before.
void ModelDrafter::take_begun() {
  for (ChainDrafting& drafting : active_) go_on(drafting);
  const auto rest =
      std::ranges::partition(active_, [](const auto& drafting) { return drafting.pending > 0; });
  DraftPass& pass = passes_[1];
  pass.clear();
  for (size_t i = 0; i < active_.size() - rest.size(); ++i) {
    pass.members.push_back(i);
    pass.counts.push_back(0);
    pass.draws.push_back(true);
    pass.draw.push_back(active_[i].drawn_by);
  }
  pass.all_draws = static_cast<size_t>(begun_.back().first_draw + begun_.back().count);
  begun_.clear();
}

// Enters the request's new tokens as computed, if the begun pass did it.
void ModelDrafter::go_on(ChainDrafting& drafting) const {
  const auto begun = std::ranges::find(begun_, drafting.request->id, &Begun::request);
  if (begun == begun_.end() || begun->begin != drafting.begin) return;
  const int32_t row = drafting.text_length() - 1 - drafting.begin;
  if (row >= begun->count) return;
  for (int32_t i = drafting.begin; i <= drafting.begin + row; ++i) {
    drafting.state->tokens.push_back(drafting.text_token(i));
  }
  drafting.pending = 1;
  drafting.drawn_by = drafting.hidden_row = begun->first_draw + row;
}

void ModelDrafter::draft_chains() {
  bool in_flight = !begun_.empty();
  if (in_flight) take_begun();
  for (size_t next = 0;; next ^= 1) {
    const bool more = choose(passes_[next]);
    if (more) enqueue(passes_[next]);
    if (in_flight && more) collect(passes_[next ^ 1], false);
    if (in_flight && !more) leave(passes_[next ^ 1]);
    if (!more) break;
    in_flight = runner_->draws();
    if (!in_flight) collect(passes_[next], true);
  }
}

// Leaves the last pass in flight: the pass that verifies the drafts can be enqueued behind it.
void ModelDrafter::leave(const DraftPass& pass) {
  left_ = &pass;
  for (size_t i = 0; i < pass.members.size(); ++i) {
    const ChainDrafting& drafting = active_[pass.members[i]];
    if (!pass.draws[i] || drafting.state == nullptr || drafting.ended) continue;
    DraftTree& drafts = drafting.request->drafts;
    drafts.tokens.push_back(DraftTree::kUnknown);
    drafts.drawn_by = drafting.drawn_by;
  }
}

// The draft model has not computed these drafts, so its text lacks them.
void ModelDrafter::finish() {
  if (!begun_.empty()) {  // for a step that has no drafts
    active_.clear();
    take_begun();
    left_ = &passes_[1];
  }
  if (left_ != nullptr) wait(*left_, {});
  left_ = nullptr;
  for (const ChainDrafting& drafting : active_) {
    DraftTree& drafts = drafting.request->drafts;
    if (drafts.drawn_by < 0) continue;
    const auto draw = static_cast<size_t>(std::exchange(drafts.drawn_by, -1));
    drafts.tokens.back() = std::max(drawn_[draw], DraftTree::kUnknown);
  }
  active_.clear();
  growing_.clear();
}

// Chooses the tokens of the next pass: those of requests that lack drafts and are not computed yet,
// within the limit. Requests whose tokens find no memory give theirs back and get no more drafts.
// Returns false if there are none.
bool ModelDrafter::choose(DraftPass& pass) {
  pass.clear();
  int32_t left = states_.limits().max_tokens;
  for (size_t i = 0; i < active_.size(); ++i) {
    ChainDrafting& drafting = active_[i];
    if (drafting.drafts() >= drafting.wanted || left == 0) continue;
    const int32_t count = std::min(left, drafting.length() - drafting.computed());
    // Keeps the window of the first token, to which the next step may return.
    if (!states_.caches().extend(drafting.state->lease, drafting.begin,
                                 drafting.computed() + count)) {
      states_.drop(drafting);
      continue;
    }
    left -= count;
    const bool draws = drafting.computed() + count == drafting.length();
    pass.draw.push_back(static_cast<int32_t>(pass.members.size()));
    pass.members.push_back(i);
    pass.counts.push_back(count);
    pass.draws.push_back(draws);
    pass.logit_rows += draws;
    ++pass.all_draws;
  }
  return !pass.members.empty();
}

// Adds the features of the request's next tokens: those that the model noted of its text, then the
// head's hidden state before a draft.
void ModelDrafter::add_features(const ChainDrafting& drafting, int32_t count) {
  for (int32_t i = drafting.computed(); i < drafting.computed() + count; ++i) {
    features_.push_back(i < drafting.text_length() ? states_.features_of(drafting, i)
                                                   : states_.hidden_state(drafting.hidden_row));
  }
}

void ModelDrafter::enqueue(DraftPass& pass) {
  tokens_.clear();
  features_.clear();
  for (size_t i = 0; i < pass.members.size(); ++i) {
    const ChainDrafting& drafting = active_[pass.members[i]];
    for (int32_t k = 0; k < pass.counts[i]; ++k)
      tokens_.push_back(drafting.token(drafting.computed() + k));
    if (states_.is_head()) add_features(drafting, pass.counts[i]);
  }
  parts_.clear();
  size_t first = 0;
  for (size_t i = 0; i < pass.members.size(); ++i) {
    const ChainDrafting& drafting = active_[pass.members[i]];
    const auto count = static_cast<size_t>(pass.counts[i]);
    parts_.push_back({.tokens = std::span(tokens_).subspan(first, count),
                      .begin = drafting.computed(),
                      .lease = &drafting.state->lease,
                      .logit_rows = pass.draws[i] ? 1 : 0,
                      .sampling = pass.draws[i] ? &drafting.state->sampling : nullptr,
                      .drawn_by = drafting.pending > 0 ? drafting.drawn_by : -1,
                      .skipped = drafting.skipped});
    if (states_.is_head()) parts_.back().features = std::span(features_).subspan(first, count);
    first += count;
  }
  runner_->enqueue(parts_);
  int32_t hidden_row = 0;
  for (size_t i = 0; i < pass.members.size(); ++i) {
    ChainDrafting& drafting = active_[pass.members[i]];
    const std::span<const int32_t> computed = parts_[i].tokens;
    drafting.state->tokens.insert(drafting.state->tokens.end(), computed.begin(), computed.end());
    drafting.pending += pass.draws[i];
    if (pass.draws[i]) drafting.hidden_row = hidden_row++;
    drafting.drawn_by = static_cast<int32_t>(i);
  }
}

void ModelDrafter::wait(const DraftPass& pass, std::span<float> logits) {
  drawn_.assign(pass.all_draws, -1);
  device_seconds_ += runner_->collect(logits, drawn_).seconds();
}

// Waits for the pass. has_logits: it is the last one that was enqueued.
void ModelDrafter::collect(const DraftPass& pass, bool has_logits) {
  const auto width = static_cast<size_t>(model_.info().vocabulary);
  const std::span<float> logits(logits_.get(), has_logits ? pass.logit_rows * width : 0);
  wait(pass, logits);
  size_t row = 0;
  for (size_t i = 0; i < pass.members.size(); ++i) {
    if (!pass.draws[i]) continue;
    const size_t own = row++;
    take_token(active_[pass.members[i]], drawn_[static_cast<size_t>(pass.draw[i])],
               has_logits ? logits.subspan(own * width, width) : logits);
  }
}

// Appends a draft, and enters it in the text that a pass after it has computed. A draft without a
// token is the last one: its request gets no more.
void ModelDrafter::take_token(ChainDrafting& drafting, int32_t drawn,
                              std::span<const float> logits) {
  --drafting.pending;
  if (drafting.state == nullptr || drafting.ended) return;  // its memory was given back
  std::vector<int32_t>& text = drafting.state->tokens;
  const auto drafts = static_cast<size_t>(drafting.request->drafts.drafts());
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
  drafting.request->drafts.tokens.push_back(drawn);
  if (text.size() > own_position) text[own_position] = drawn;
}

}  // namespace

std::unique_ptr<Drafter> make_model_drafter(const DraftModel& draft, SizedEngine sized,
                                            ThreadPool& threads, CacheSet& caches, bool host_draws,
                                            const DrawnLists& drawn) {
  return std::make_unique<ModelDrafter>(draft, std::move(sized), threads, caches, host_draws,
                                        drawn);
}

}  // namespace fovea
