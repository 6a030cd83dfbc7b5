// SPDX-License-Identifier: Apache-2.0
// TextEngine::step with drafts: which requests get some, and which of them become text. Rejected
// drafts leave nothing behind, because the request's memory is cut to its text.
#include <algorithm>

#include "engine/text_engine.h"

namespace fovea {
namespace {

// Cuts a text to its length when it goes out of scope.
struct Restored {
  std::vector<int32_t>& tokens;
  size_t length;
  ~Restored() { tokens.resize(length); }
};

}  // namespace

// Requests whose last token alone is not computed get drafts, if other tokens leave room for them.
void TextEngine::add_drafts(EnginePass& pass, std::span<const Chunk> chunks) {
  drafting_.clear();
  drafting_chunks_.clear();
  for (size_t i = 0; i < chunks.size(); ++i) {
    Request& request = *chunks[i].request;
    const bool decodes =
        chunks[i].begin >= request.prompt_tokens && chunks[i].end == request.length();
    if (!decodes || chunks[i].end - chunks[i].begin != 1) continue;
    drafting_.push_back(&request);
    drafting_chunks_.push_back(i);
  }
  if (drafting_.empty()) return;
  pass.draft_width =
      control_.width(static_cast<int32_t>(drafting_.size()), drafting_.size() == chunks.size());
  if (pass.draft_width == 0) return;
  parts_.drafter->draft(drafting_, pass.draft_width);
  for (size_t i = 0; i < drafting_.size(); ++i) {
    std::vector<int32_t>& chain = drafting_[i]->chain;
    const auto wanted = static_cast<int32_t>(chain.size()) - 1;
    chain.resize(1 + static_cast<size_t>(scheduler_.add_drafts(drafting_chunks_[i], wanted)));
  }
}

// Returns how many drafts of a chunk are accepted without a look at their draws.
int32_t TextEngine::accepted_anyway(const Chunk& chunk) const {
  return chunk.drafts > 0 ? parts_.drafter->accepted_anyway(*chunk.request) : -1;
}

// Draws the request's next token, and with drafts the tokens after it, up to the first one that is
// not its draft or ends the request. Each draw sees the text before it, as without drafts.
void TextEngine::draw_tokens(Outcome& outcome, Sampler& sampler) const {
  Request& request = *outcome.chunk.request;
  const auto drafts = static_cast<size_t>(outcome.chunk.drafts);
  const size_t end = outcome.first_row + static_cast<size_t>(outcome.logit_rows);
  const Restored restored{request.tokens, request.tokens.size()};
  const int32_t anyway = accepted_anyway(outcome.chunk);
  Grammar ahead;
  grammar::TokenMask allowed;
  for (size_t i = 0;; ++i) {
    const auto [prompt, output] = request.parts();
    allowed_tokens(i == 0 ? request.grammar : ahead, allowed);
    outcome.sampled.push_back(sampler.sample(logit_rows(end - 1 - drafts + i, 1), request.sampling,
                                             TokenHistory{prompt, output, end_tokens(), allowed}));
    int32_t& token = outcome.sampled.back().token;
    if (static_cast<int32_t>(i) < anyway) token = request.chain[i + 1];
    if (i == drafts || token != request.chain[i + 1]) return;
    if (i == 0) ahead = request.grammar;
    const bool ends_value = read_by_grammar(ahead, token);
    request.tokens.push_back(token);
    if (ends_value || finish_reason(request, token) != FinishReason::none) return;
  }
}

// Takes the tokens that the runner drew after each row, as draw_tokens() would draw them.
void TextEngine::take_drawn(Outcome& outcome) const {
  Request& request = *outcome.chunk.request;
  const auto drafts = static_cast<size_t>(outcome.chunk.drafts);
  const Restored restored{request.tokens, request.tokens.size()};
  const int32_t anyway = accepted_anyway(outcome.chunk);
  Grammar ahead;
  for (size_t i = 0;; ++i) {
    const bool given = static_cast<int32_t>(i) < anyway;
    const int32_t token = given ? request.chain[i + 1] : outcome.drawn[i];
    outcome.sampled.push_back({token});
    if (i == drafts || token != request.chain[i + 1]) return;
    if (i == 0) ahead = request.grammar;
    const bool ends_value = read_by_grammar(ahead, token);
    request.tokens.push_back(token);
    if (ends_value || finish_reason(request, token) != FinishReason::none) return;
  }
}

// Cuts the request's memory to its text.
void TextEngine::keep_text(const Outcome& outcome) {
  if (outcome.chunk.drafts == 0) return;
  Request& request = *outcome.chunk.request;
  request.computed = request.length() - 1;
  parts_.caches->truncate(request.lease, request.computed);
}

// Counts the drafts of a pass whose tokens are drawn.
void TextEngine::count_drafts(EnginePass& pass, double seconds) {
  StepRecord& record = pass.record;
  for (const Outcome& outcome : pass.outcomes) {
    if (outcome.chunk.drafts == 0 || outcome.sampled.empty()) continue;
    record.accepted_drafts += static_cast<int32_t>(outcome.sampled.size()) - 1;
  }
  stats_.draft_steps += record.drafts > 0;
  stats_.draft_requests += record.draft_requests;
  stats_.drafts += record.drafts;
  stats_.accepted_drafts += record.accepted_drafts;
  if (record.decodes != record.requests) return;
  if (!parts_.always_speculate) {
    seconds = 1e-9 * static_cast<double>(parts_.model->device().largest_of_ranks(
                         static_cast<int64_t>(1e9 * seconds)));
  }
  control_.record({.requests = record.requests,
                   .width = pass.draft_width,
                   .drafts = record.drafts,
                   .accepted = record.accepted_drafts,
                   .seconds = seconds});
}

}  // namespace fovea
