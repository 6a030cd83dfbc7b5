// SPDX-License-Identifier: Apache-2.0
#include "engine/text_engine.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "engine/graph_sizes.h"
#include "engine/plan_engine.h"

namespace fovea {
namespace {

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
          parts_.limits.logit_rows() * static_cast<size_t>(parts_.request_limits.vocabulary))),
      control_(parts_.limits.max_drafts, parts_.always_speculate) {
  if (parts_.tokenizer) grammars_ = std::make_unique<Grammars>(*parts_.tokenizer, vocabulary());
  stats_.memory = parts_.runner->stats().memory;
  stats_.memory.weights = parts_.weight_bytes;
  stats_.memory.caches = parts_.cache_bytes;
  stats_.memory.drafter = parts_.drafter_bytes;
  if (parts_.model->device().kind() == DeviceKind::cpu) {
    stats_.memory.logits = host_logit_bytes(parts_.limits, vocabulary(), parts_.threads->size());
  }
  ended_.reserve(2 * static_cast<size_t>(parts_.limits.max_running));  // all in two passes
  // States cannot forget a token that was computed after the end of its request.
  overlap_ = parts_.overlap && parts_.runner->draws() && !parts_.caches->has_state();
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
  added->max_length =
      added->length() + std::min(request.sampling.max_new_tokens, max_context() - added->length());
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
  if (request.length() >= request.max_length) return FinishReason::length;
  return FinishReason::none;
}

std::vector<float> TextEngine::logits(std::span<const int32_t> tokens) {
  check_tokens(tokens, vocabulary());
  check_argument(tokens.size() <= static_cast<size_t>(max_context()),
                 "the sequence has {} tokens, the context is {}", tokens.size(), max_context());
  if (next_) finish_pass(*std::exchange(next_, nullptr));  // its events wait for step()
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
  stats_.speculation_gain = control_.gain();
  stats_.kv_pages = parts_.caches->pages().pages() - 1;
  stats_.kv_pages_free = parts_.caches->pages().free_pages();
  return stats_;
}

// Says where the device waits for the host in a step with drafts of a model or a head.
std::string TextEngine::explain_waits() const {
  if (!parts_.runner->draws()) return "drafts are read before the pass that verifies them begins\n";
  if (parts_.draft_branches > 1) return "each step that makes drafts waits for the one before\n";
  return fmt::format("the pass that verifies drafts is enqueued while these are made{}\n",
                     parts_.drafter->begins_next() ? ", and the next drafts begin behind it" : "");
}

std::string TextEngine::explain() const {
  std::string text;
  for (const GroupSelection& selection : parts_.selections) text += fovea::explain(selection);
  const EngineStats& now = stats();
  text += now.memory.explain();
  if (now.graphs.count() > 0) {
    text += now.graphs.explain();
    text += fmt::format(
        "decode steps of up to {} requests have graphs for up to {} tokens each, steps with chunks "
        "of prompts for up to {} tokens together\n",
        kMaxShortRequests, fmt::join(graph_contexts(1, parts_.request_limits.max_context), ", "),
        kMaxChunkTokens);
    if (parts_.limits.max_drafts > 0) {
      text +=
          fmt::format("steps of up to {} requests and {} tokens have graphs for up to {} drafts\n",
                      kMaxVerifyRequests, kMaxVerifyTokens, parts_.limits.max_drafts);
    }
  }
  if (parts_.draft_model) text += explain_waits();
  return text;
}

}  // namespace fovea
