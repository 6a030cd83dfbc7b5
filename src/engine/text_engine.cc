// SPDX-License-Identifier: Apache-2.0
#include "engine/text_engine.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "core/check.h"
#include "engine/graph_sizes.h"
#include "engine/plan_engine.h"

namespace fovea {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Returns the leading tokens of the request that are computed.
CachedText computed_text(const Request& request) {
  return {std::span(request.tokens).first(static_cast<size_t>(request.computed)), request.salt};
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

bool contains(std::span<const int32_t> tokens, int32_t token) {
  return std::ranges::find(tokens, token) != tokens.end();
}

}  // namespace

TextEngine::TextEngine(EngineParts parts)
    : parts_(std::move(parts)),
      scheduler_(*parts_.caches, parts_.limits),
      samplers_(static_cast<size_t>(parts_.threads->size()),
                Sampler(parts_.request_limits.vocabulary)),
      logits_(std::make_unique_for_overwrite<float[]>(
          (static_cast<size_t>(parts_.limits.max_running) +
           static_cast<size_t>(parts_.limits.max_prompt_rows)) *
          static_cast<size_t>(parts_.request_limits.vocabulary))) {
  if (parts_.tokenizer) grammars_ = std::make_unique<Grammars>(*parts_.tokenizer, vocabulary());
  stats_.memory = parts_.runner->stats().memory;
  stats_.memory.weights = parts_.weight_bytes;
  stats_.memory.caches = parts_.cache_bytes;
  if (parts_.model->device().kind() == DeviceKind::cpu) {
    stats_.memory.logits = host_logit_bytes(parts_.limits, vocabulary(), parts_.threads->size());
  }
}

std::vector<int32_t> TextEngine::checked_tokens(const GenerateRequest& request) const {
  check_sampling_params(request.sampling, vocabulary());
  std::vector<int32_t> tokens = request.tokens.empty() ? encode(request.prompt) : request.tokens;
  check_prompt(tokens, parts_.request_limits);
  if (!request.sampling.stop.empty()) tokenizer();
  (void)compile_schema(request.sampling);
  return tokens;
}

void TextEngine::check(const GenerateRequest& request) const { (void)checked_tokens(request); }

int64_t TextEngine::add(const GenerateRequest& request) {
  auto added = std::make_unique<Request>();
  added->tokens = checked_tokens(request);
  added->sampling = request.sampling;
  added->salt = request.salt;
  added->prompt_tokens = added->length();
  if (parts_.tokenizer) added->characters = parts_.tokenizer->stream();
  added->stops = StopMatcher(request.sampling.stop);
  if (const auto schema = compile_schema(request.sampling)) added->grammar.emplace(schema);
  if (request.sampling.prompt_logprobs) {
    added->prompt_logprobs.resize(added->tokens.size());
    if (request.sampling.logprobs > 0) added->prompt_top.resize(added->tokens.size());
  }
  added->id = next_id_++;
  const int64_t id = added->id;
  scheduler_.add(std::move(added));
  return id;
}

void TextEngine::cancel(int64_t request) {
  Request* found = scheduler_.find(request);
  if (found == nullptr) return;
  TokenEvent event;
  event.finish = FinishReason::cancelled;
  event.text = found->held_text();
  end_request(request, std::move(event));
}

std::vector<TokenEvent> TextEngine::step() {
  const std::span<const Chunk> chunks = schedule();
  if (chunks.empty()) return std::exchange(events_, {});
  const auto start = std::chrono::steady_clock::now();
  try {
    events_.reserve(events_.size() + chunks.size());  // ensures that no event is lost
    run_pass(chunks);
    sample_pass();
  } catch (...) {
    // Linear states may be half updated, so all tokens of this pass are computed again.
    while (scheduler_.preempt_youngest()) {
    }
    throw;
  }
  count_pass(seconds_since(start));
  for (Outcome& outcome : outcomes_) deliver(outcome);
  return std::exchange(events_, {});
}

std::span<const Chunk> TextEngine::schedule() {
  while (true) {
    try {
      return scheduler_.schedule();
    } catch (const RequestError& error) {
      fail_request(error.request(), error.what());
    }
  }
}

void TextEngine::run_pass(std::span<const Chunk> chunks) {
  outcomes_.clear();
  pass_.clear();
  size_t rows = 0;
  for (const Chunk& chunk : chunks) {
    Request& request = *chunk.request;
    Outcome outcome;
    outcome.chunk = chunk;
    outcome.first_row = rows;
    if (request.scores_prompt()) {
      outcome.logit_rows = chunk.end - chunk.begin;
    } else if (chunk.end == request.length()) {
      outcome.logit_rows = 1;
    }
    rows += static_cast<size_t>(outcome.logit_rows);
    const auto tokens = std::span<const int32_t>(request.tokens)
                            .subspan(static_cast<size_t>(chunk.begin),
                                     static_cast<size_t>(chunk.end - chunk.begin));
    const bool only_token = chunk.end == request.length() && !request.draws_on_host();
    pass_.push_back({tokens, chunk.begin, &request.lease, outcome.logit_rows,
                     only_token ? &request.sampling : nullptr});
    outcomes_.push_back(std::move(outcome));
  }
  drawn_.resize(pass_.size());
  parts_.runner->run(pass_, logit_rows(0, rows), drawn_);
  for (size_t i = 0; i < outcomes_.size(); ++i) outcomes_[i].drawn = drawn_[i];
}

std::span<float> TextEngine::logit_rows(size_t first, size_t count) const {
  const auto width = static_cast<size_t>(vocabulary());
  return {logits_.get() + first * width, count * width};
}

void TextEngine::sample_pass() {
  parts_.threads->parallel_for(static_cast<int64_t>(outcomes_.size()),
                               [this](int64_t index, int worker) {
                                 Outcome& outcome = outcomes_[static_cast<size_t>(index)];
                                 try {
                                   sample(outcome, samplers_[static_cast<size_t>(worker)]);
                                 } catch (...) {
                                   outcome.failure = describe_failure();
                                 }
                               });
}

void TextEngine::sample(Outcome& outcome, Sampler& sampler) {
  if (outcome.drawn >= 0) {
    outcome.sampled.token = outcome.drawn;
    return;
  }
  Request& request = *outcome.chunk.request;
  if (request.scores_prompt()) {
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
  if (outcome.chunk.end != request.length()) return;
  const size_t last = outcome.first_row + static_cast<size_t>(outcome.logit_rows) - 1;
  const auto [prompt, output] = request.parts();
  const grammar::TokenMask allowed = allowed_tokens(request);
  outcome.sampled = sampler.sample(logit_rows(last, 1), request.sampling,
                                   TokenHistory{prompt, output, end_tokens(), allowed});
}

void TextEngine::count_pass(double seconds) {
  int64_t decoded = 0, total = 0;
  for (const Outcome& outcome : outcomes_) {
    total += outcome.chunk.end - outcome.chunk.begin;
    decoded += is_decode(outcome.chunk);
  }
  const double share = static_cast<double>(decoded) / static_cast<double>(total);
  ++stats_.steps;
  stats_.decode_tokens += decoded;
  stats_.prefill_tokens += total - decoded;
  stats_.decode_seconds += seconds * share;
  stats_.prefill_seconds += seconds * (1 - share);
}

void TextEngine::deliver(Outcome& outcome) {
  try {
    if (outcome.failure.empty()) accept(outcome);
  } catch (...) {
    outcome.failure = describe_failure();
  }
  if (!outcome.failure.empty()) {
    fail_request(outcome.chunk.request->id, std::move(outcome.failure));
  }
}

// If it throws, the request is unchanged.
void TextEngine::accept(Outcome& outcome) {
  Request& request = *outcome.chunk.request;
  request.computed = outcome.chunk.end;
  if (!is_decode(outcome.chunk)) parts_.caches->publish(request.lease, computed_text(request));
  if (request.remaining() == 0) emit(request, std::move(outcome.sampled));
}

void TextEngine::emit(Request& request, SampledToken sampled) {
  TokenEvent event;
  event.request = request.id;
  event.token = sampled.token;
  event.logprob = sampled.logprob;
  event.top = std::move(sampled.top);
  const bool ends_value = read_by_grammar(request, sampled.token);
  request.tokens.push_back(sampled.token);
  event.finish = finish_reason(request, sampled.token);
  if (event.finish != FinishReason::stop) {
    event.text = text_of(request, sampled.token);
    if (request.stops.matched() || ends_value) event.finish = FinishReason::stop;
  }
  if (event.finish == FinishReason::none) {
    events_.push_back(std::move(event));
    return;
  }
  event.text += request.held_text();
  parts_.caches->publish(request.lease, computed_text(request));
  end_request(request.id, std::move(event));
}

// Returns the text that the token makes certain.
std::string TextEngine::text_of(Request& request, int32_t token) const {
  if (!request.characters) return {};
  const std::string_view special = parts_.tokenizer->special_text(token);
  if (!special.empty()) return request.stops.push_hidden(special);
  return request.stops.push(request.characters->push(token));
}

const Tokenizer& TextEngine::tokenizer() const {
  if (!parts_.tokenizer) {
    fail(ErrorCode::unsupported, "there is no tokenizer, give token ids instead of text: {}",
         parts_.why_no_tokenizer->what());
  }
  return *parts_.tokenizer;
}

// Ignores stop strings, which depend on the text.
FinishReason TextEngine::finish_reason(const Request& request, int32_t token) const {
  const SamplingParams& sampling = request.sampling;
  if (!sampling.ignore_eos && contains(parts_.model->info().eos_tokens, token))
    return FinishReason::stop;
  if (contains(sampling.stop_tokens, token)) return FinishReason::stop;
  if (request.generated() >= sampling.max_new_tokens || request.length() >= max_context())
    return FinishReason::length;
  return FinishReason::none;
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
  const std::unique_ptr<Request> request = scheduler_.remove(id);
  event.request = id;
  event.prompt_tokens = request->prompt_tokens;
  event.cached_tokens = request->cached_tokens.value_or(0);
  if (request->generated() > 0) {
    event.prompt_logprobs = std::move(request->prompt_logprobs);
    event.prompt_top = std::move(request->prompt_top);
  }
  events_.push_back(std::move(event));
}

std::vector<float> TextEngine::logits(std::span<const int32_t> tokens) {
  check_tokens(tokens, vocabulary());
  check_argument(tokens.size() <= static_cast<size_t>(max_context()),
                 "the sequence has {} tokens, the context is {}", tokens.size(), max_context());
  std::vector<float> result(tokens.size() * static_cast<size_t>(vocabulary()));
  if (tokens.empty()) return result;

  struct Alone {
    CacheSet& caches;
    CacheLease lease;
    ~Alone() { caches.release(lease); }
  } alone{*parts_.caches, admit_alone(tokens)};
  const auto length = static_cast<int32_t>(tokens.size());
  for (int32_t begin = 0; begin < length; begin += parts_.limits.max_batch_tokens) {
    const int32_t end = std::min(length, begin + parts_.limits.max_batch_tokens);
    while (!parts_.caches->extend(alone.lease, begin, end)) {
      if (!scheduler_.preempt_youngest())
        fail(ErrorCode::out_of_memory, "the pools cannot hold {} tokens alone", end);
    }
    const auto first = static_cast<size_t>(begin), count = static_cast<size_t>(end - begin);
    const PassPart part{tokens.subspan(first, count), begin, &alone.lease, end - begin};
    const auto width = static_cast<size_t>(vocabulary());
    int32_t drawn = -1;
    parts_.runner->run({&part, 1}, std::span(result).subspan(first * width, count * width),
                       {&drawn, 1});
  }
  return result;
}

CacheLease TextEngine::admit_alone(std::span<const int32_t> tokens) {
  while (true) {
    std::optional<CacheLease> lease = parts_.caches->admit({tokens, {}}, false, 0);
    if (lease) return std::move(*lease);
    if (!scheduler_.preempt_youngest())
      fail(ErrorCode::out_of_memory, "the pools cannot hold {} tokens alone", tokens.size());
  }
}

std::vector<int32_t> TextEngine::encode(std::string_view text) const {
  return tokenizer().encode(text);
}

std::vector<int32_t> TextEngine::encode_bare(std::string_view text) const {
  return tokenizer().encode_bare(text);
}

std::vector<int32_t> TextEngine::encode_chat(const ChatPrompt& prompt) const {
  return tokenizer().encode_bare(parts_.chat.render(prompt));
}

std::string TextEngine::decode(std::span<const int32_t> tokens) const {
  return parts_.tokenizer ? parts_.tokenizer->decode(tokens) : std::string();
}

std::string TextEngine::token_bytes(int32_t token) const {
  return parts_.tokenizer ? parts_.tokenizer->token_bytes(token) : std::string();
}

const EngineStats& TextEngine::stats() const {
  const RunnerStats runner = parts_.runner->stats();
  stats_.memory.graphs = runner.memory.graphs;
  stats_.graphs = runner.graphs;
  stats_.shared_steps = runner.shared_steps;
  stats_.prefix_queries = scheduler_.prefix_queries();
  stats_.prefix_hits = scheduler_.prefix_hits();
  stats_.preemptions = scheduler_.preemptions();
  stats_.kv_pages = parts_.caches->pages().pages() - 1;
  stats_.kv_pages_free = parts_.caches->pages().free_pages();
  return stats_;
}

std::string TextEngine::explain() const {
  std::string text;
  for (const GroupSelection& selection : parts_.selections) text += fovea::explain(selection);
  const EngineStats& now = stats();
  text += now.memory.explain();
  if (now.graphs > 0) {
    text += fmt::format(
        "{} graphs of decode steps; of up to {} requests for up to {} tokens each\n", now.graphs,
        kMaxShortRequests, fmt::join(graph_contexts(1, parts_.request_limits.max_context), ", "));
  }
  return text;
}

}  // namespace fovea
