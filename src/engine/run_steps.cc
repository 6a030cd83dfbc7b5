// SPDX-License-Identifier: Apache-2.0
// TextEngine::step: passes from the scheduler's choice to events. With overlap, up to two passes
// are in flight: the next one is enqueued before the host waits for the one that step() finishes.
#include <algorithm>
#include <exception>
#include <new>
#include <utility>

#include "core/check.h"
#include "engine/text_engine.h"

namespace fovea {
namespace {

// The token of a part whose token is drawn by the pass before.
constexpr int32_t kUnknownToken = 0;

// Returns the first `count` tokens of the request.
CachedText first_tokens(const Request& request, int32_t count) {
  return {std::span(request.tokens).first(static_cast<size_t>(count)), request.salt};
}

bool is_decode(const Chunk& chunk) {
  return chunk.end - chunk.begin == 1 && chunk.begin >= chunk.request->prompt_tokens;
}

// Describes the current exception, which ends a request. The text for exhausted memory fits into
// std::string without an allocation.
std::string describe_failure() {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return "out of memory";
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace

double TextEngine::now() const {
  return std::chrono::duration<double>(Clock::now() - loaded_).count();
}

std::vector<TokenEvent> TextEngine::step() {
  if (next_ == nullptr && !start_pass(false)) return std::exchange(events_, {});
  EnginePass& pass = *std::exchange(next_, nullptr);
  if (can_run_ahead(pass)) {
    try {
      start_pass(true);
    } catch (...) {
      finish_pass(pass);  // its events wait for the next step()
      throw;
    }
  }
  finish_pass(pass);
  draw_masked();
  return std::exchange(events_, {});
}

// The next pass may be chosen before the results of `pass` are known, unless the host makes its
// tokens, or a waiting request may find its prefix in the cache when the pass has ended.
bool TextEngine::can_run_ahead(const EnginePass& pass) const {
  const bool offers = pass.offers_prefix && parts_.caches->prefix_cache();
  return overlap_ && !pass.needs_logits && !(offers && scheduler_.may_admit());
}

// Enqueues the next pass. Returns false if there is nothing to compute. If it throws, all requests
// are preempted: linear states may be half updated, so all their tokens are computed again.
bool TextEngine::start_pass(bool ahead) {
  EnginePass& pass = passes_[started_passes_ % 2];
  pass.outcomes.clear();
  pass.logit_rows = pass.draws = pass.masked_draws = 0;
  pass.needs_logits = pass.offers_prefix = false;
  pass.draft_width = 0;
  pass.record = {.step = started_passes_, .overlapped = ahead, .schedule_begin = now()};
  try {
    const std::span<const Chunk> chunks = schedule(ahead);
    if (chunks.empty()) return false;
    if (parts_.drafter) add_drafts(pass, chunks);
    parts_of_pass_.clear();
    for (const Chunk& chunk : chunks) parts_of_pass_.push_back(add_chunk(pass, chunk));
    pass.record.enqueue_begin = now();
    parts_.runner->enqueue(parts_of_pass_);
    if (parts_.drafter) finish_drafts(pass);
  } catch (...) {
    if (parts_.drafter) give_up_drafts();
    preempt_all();
    throw;
  }
  pass.record.enqueue_end = now();
  for (const Outcome& outcome : pass.outcomes) {
    Request& request = *outcome.chunk.request;
    request.computed = outcome.chunk.end;
    ++request.passes;
    request.pending += outcome.gives_token;
    request.drawn_by = static_cast<int32_t>(outcome.first_draw);
  }
  next_ = &pass;
  ++started_passes_;
  if (!ahead) draw_masked();
  if (pass.draft_width > 0) begin_next_drafts(pass);
  return true;
}

std::span<const Chunk> TextEngine::schedule(bool ahead) {
  while (true) {
    try {
      return scheduler_.schedule();
    } catch (const RequestError& error) {
      if (ahead) return {};  // its token in flight comes first; then the error comes again
      fail_request(error.request(), error.what());
    }
  }
}

PassPart TextEngine::add_chunk(EnginePass& pass, const Chunk& chunk) const {
  const Request& request = *chunk.request;
  Outcome outcome;
  outcome.chunk = chunk;
  outcome.first_row = pass.logit_rows;
  outcome.preemptions = request.preemptions;
  outcome.gives_token = chunk.end == request.scheduled();
  if (request.scores_prompt()) {
    outcome.logit_rows = chunk.end - chunk.begin;
  } else if (outcome.gives_token) {
    outcome.logit_rows = 1 + chunk.drafts;
  }
  pass.logit_rows += static_cast<size_t>(outcome.logit_rows);
  const bool only_tokens = outcome.gives_token && !request.draws_on_host();
  pass.needs_logits |= outcome.logit_rows > 0 && !only_tokens;
  const bool decodes = is_decode(chunk);
  pass.offers_prefix |= !decodes;
  ++pass.record.requests;
  pass.record.decodes += decodes;
  pass.record.tokens += chunk.end - chunk.begin + chunk.drafts;
  pass.record.drafts += chunk.drafts;
  pass.record.draft_requests += chunk.drafts > 0;
  PassPart part{.begin = chunk.begin,
                .lease = &request.lease,
                .logit_rows = outcome.logit_rows,
                .sampling = only_tokens ? &request.sampling : nullptr};
  outcome.masked = part.masked = only_tokens && request.grammar && parts_.runner->draws();
  outcome.first_draw = pass.draws;
  outcome.draws = static_cast<size_t>(part.draws());
  pass.draws += outcome.draws;
  pass.masked_draws += part.masked ? outcome.draws : 0;
  if (request.pending > 0) {
    part.tokens = {&kUnknownToken, 1};
    part.drawn_by = request.drawn_by;
  } else if (chunk.drafts > 0) {
    part.tokens = request.drafts.tokens;
    part.parents = request.drafts.parents;
    part.taken = request.drafts.drawn_by >= 0 ? 1 : 0;
    part.taken_from = request.drafts.drawn_by;
  } else {
    part.tokens = std::span<const int32_t>(request.tokens)
                      .subspan(static_cast<size_t>(chunk.begin),
                               static_cast<size_t>(chunk.end - chunk.begin));
  }
  pass.outcomes.push_back(std::move(outcome));
  return part;
}

// Waits for the pass and turns its results into events.
void TextEngine::finish_pass(EnginePass& pass) {
  PassTimes times;
  try {
    // Ensures that no event is lost.
    events_.reserve(events_.size() + pass.outcomes.size() +
                    static_cast<size_t>(pass.record.drafts));
    drawn_.resize(pass.draws);
    pass.record.wait_begin = now();
    times = parts_.runner->collect(
        next_ == nullptr ? logit_rows(0, pass.logit_rows) : std::span<float>(), drawn_);
    pass.record.wait_end = now();
    find_drawn(pass);
    sample_pass(pass);
    if (parts_.record_steps) records_.emplace_back();
  } catch (...) {
    give_up(pass);
    throw;
  }
  settle(pass);
  count_pass(pass, times);
  move_accepted(pass);
  for (Outcome& outcome : pass.outcomes) deliver(outcome);
  std::erase_if(ended_, [](const auto& request) { return request->passes == 0; });
  pass.record.deliver_end = now();
  if (parts_.record_steps) records_.back() = pass.record;
}

// The pass is no longer in flight.
void TextEngine::settle(EnginePass& pass) {
  for (const Outcome& outcome : pass.outcomes) {
    --outcome.chunk.request->passes;
    outcome.chunk.request->pending -= outcome.gives_token;
  }
}

// Forgets the pass, and the one after it, whose tokens depend on it.
void TextEngine::give_up(EnginePass& pass) {
  if (parts_.drafter) parts_.drafter->abandon();
  parts_.runner->abandon();
  settle(pass);
  if (next_ != nullptr) settle(*std::exchange(next_, nullptr));
  ended_.clear();
  preempt_all();
}

void TextEngine::preempt_all() {
  while (scheduler_.preempt_youngest()) {
  }
}

// Gives each chunk the tokens that the runner drew for it, if it drew all of them.
void TextEngine::find_drawn(EnginePass& pass) {
  for (Outcome& outcome : pass.outcomes) {
    const std::span<const int32_t> drawn =
        std::span(drawn_).subspan(outcome.first_draw, outcome.draws);
    if (std::ranges::all_of(drawn, [](int32_t token) { return token >= 0; })) outcome.drawn = drawn;
  }
}

std::span<float> TextEngine::logit_rows(size_t first, size_t count) const {
  const auto width = static_cast<size_t>(vocabulary());
  return {logits_.get() + first * width, count * width};
}

void TextEngine::sample_pass(EnginePass& pass) {
  const bool has_logits = next_ == nullptr;
  const auto sample_one = [&](int64_t index, int worker) {
    Outcome& outcome = pass.outcomes[static_cast<size_t>(index)];
    try {
      sample(outcome, has_logits, samplers_[static_cast<size_t>(worker)]);
    } catch (...) {
      outcome.failure = describe_failure();
    }
  };
  const auto count = static_cast<int64_t>(pass.outcomes.size());
  if (!pass.needs_logits && parts_.runner->draws()) {
    for (int64_t i = 0; i < count; ++i) sample_one(i, 0);
  } else {
    parts_.threads->parallel_for(count, sample_one);
  }
}

void TextEngine::sample(Outcome& outcome, bool has_logits, Sampler& sampler) {
  if (!outcome.drawn.empty()) return take_drawn(outcome);
  Request& request = *outcome.chunk.request;
  if (request.ended || outcome.logit_rows == 0) return;
  if (!has_logits) {
    fail(ErrorCode::device_failure, "the logits of the next token are NaN, +inf or all -inf");
  }
  if (request.scores_prompt()) score_prompt(outcome, sampler);
  if (outcome.gives_token) draw_tokens(outcome, sampler);
}

void TextEngine::score_prompt(const Outcome& outcome, Sampler& sampler) const {
  Request& request = *outcome.chunk.request;
  for (int32_t row = 0; row < outcome.logit_rows; ++row) {
    const auto scored = static_cast<size_t>(outcome.chunk.begin + row + 1);
    if (scored >= request.tokens.size()) break;
    SampledToken score =
        sampler.score(logit_rows(outcome.first_row + static_cast<size_t>(row), 1),
                      request.tokens[scored], std::max(request.sampling.logprobs, 0));
    request.prompt_logprobs[scored] = score.logprob;
    if (!score.top.empty()) request.prompt_top[scored] = std::move(score.top);
  }
}

void TextEngine::count_pass(EnginePass& pass, const PassTimes& times) {
  const auto since_load = [&](Clock::time_point time) {
    return std::chrono::duration<double>(time - loaded_).count();
  };
  StepRecord& record = pass.record;
  record.device_begin = since_load(times.begin);
  record.device_end = since_load(times.end);
  const double end = now();
  const double seconds = end - std::max(counted_until_, record.schedule_begin);
  counted_until_ = end;
  const double share =
      static_cast<double>(record.decodes + record.drafts) / static_cast<double>(record.tokens);
  if (parts_.drafter) count_drafts(pass, seconds);
  ++stats_.steps;
  stats_.overlapped_steps += record.overlapped;
  stats_.decode_tokens += record.decodes + record.accepted_drafts;
  stats_.prefill_tokens += record.tokens - record.decodes - record.drafts;
  stats_.decode_seconds += seconds * share;
  stats_.prefill_seconds += seconds * (1 - share);
}

void TextEngine::deliver(Outcome& outcome) {
  if (outcome.chunk.request->ended) return;
  const int64_t id = outcome.chunk.request->id;
  bool continues = true;
  try {
    if (outcome.failure.empty() || !outcome.sampled.empty()) continues = accept(outcome);
  } catch (...) {
    outcome.failure = describe_failure();
  }
  if (continues && !outcome.failure.empty()) fail_request(id, std::move(outcome.failure));
}

// Returns false if the request has ended. If it throws, the request has all tokens up to one.
bool TextEngine::accept(Outcome& outcome) {
  Request& request = *outcome.chunk.request;
  const bool holds_lease = outcome.preemptions == request.preemptions;
  if (holds_lease && !is_decode(outcome.chunk)) {
    parts_.caches->publish(request.lease, first_tokens(request, outcome.chunk.end));
  }
  for (SampledToken& sampled : outcome.sampled) {
    if (!emit(outcome, sampled)) return false;
  }
  if (holds_lease) keep_text(outcome);
  return true;
}

// Returns false if the token ends the request. If it throws, the request is unchanged.
bool TextEngine::emit(const Outcome& outcome, SampledToken& sampled) {
  Request& request = *outcome.chunk.request;
  TokenEvent event;
  event.request = request.id;
  event.token = sampled.token;
  event.logprob = sampled.logprob;
  event.top = std::move(sampled.top);
  const bool ends_value = read_by_grammar(request.grammar, event.token);
  request.tokens.push_back(event.token);
  event.finish = finish_reason(request, event.token);
  if (event.finish != FinishReason::stop) {
    event.text = text_of(request, event.token);
    if (request.stops.matched() || ends_value) event.finish = FinishReason::stop;
  }
  if (event.finish == FinishReason::none) {
    events_.push_back(std::move(event));
    return true;
  }
  event.text += request.held_text();
  if (outcome.preemptions == request.preemptions) {
    keep_text(outcome);
    parts_.caches->publish(request.lease, first_tokens(request, request.length() - 1));
  }
  end_request(request.id, std::move(event));
  return false;
}

void TextEngine::fail_request(int64_t id, std::string why) {
  TokenEvent event;
  event.finish = FinishReason::failed;
  event.error = std::move(why);
  try {
    if (Request* found = scheduler_.find(id)) event.text = found->held_text();
  } catch (const std::bad_alloc&) {  // loses the short withheld text
  }
  end_request(id, std::move(event));
}

void TextEngine::end_request(int64_t id, TokenEvent event) {
  events_.reserve(events_.size() + 1);  // comes first: if it throws, the request is unchanged
  std::unique_ptr<Request> request = scheduler_.remove(id);
  if (parts_.drafter) parts_.drafter->forget(id);
  event.request = id;
  event.prompt_tokens = request->prompt_tokens;
  event.cached_tokens = request->cached_tokens.value_or(0);
  if (request->generated() > 0) {
    event.prompt_logprobs = std::move(request->prompt_logprobs);
    event.prompt_top = std::move(request->prompt_top);
  }
  events_.push_back(std::move(event));
  request->ended = true;
  if (request->passes > 0) ended_.push_back(std::move(request));
}

}  // namespace fovea
