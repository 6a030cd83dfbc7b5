// SPDX-License-Identifier: Apache-2.0
// TextEngine::step with drafts: which requests get some, and which of them become text. Rejected
// drafts leave nothing behind, because the request's memory is cut to its text.
#include <algorithm>
#include <utility>

#include "engine/text_engine.h"
#include "fovea/speculation.h"

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
  const bool fits_a_mask = std::ranges::all_of(
      chunks, [](const Chunk& chunk) { return chunk.end - chunk.begin <= kMaxDraftNodes; });
  parts_.drafter->draft(drafting_, pass.draft_width, fits_a_mask ? parts_.draft_branches : 1);
  for (size_t i = 0; i < drafting_.size(); ++i) {
    DraftTree& drafts = drafting_[i]->drafts;
    drafts.keep(scheduler_.add_drafts(drafting_chunks_[i], drafts.drafts()));
  }
}

// Waits for drafts that the drafter has left to the device, while the pass that verifies them waits
// for them there.
void TextEngine::finish_drafts(EnginePass& pass) {
  parts_.drafter->finish();
  if (pass.draft_width > 0) {
    pass.record.draft_device_seconds = parts_.drafter->device_seconds();
  }
}

// Lets the drafter work on the next step's drafts while the host waits for this pass, reads its
// tokens and chooses the next one. Trees, and tokens that the host draws, have to wait for that.
void TextEngine::begin_next_drafts(EnginePass& pass) {
  if (parts_.draft_branches > 1 || !parts_.drafter->begins_next()) return;
  try {
    drawn_texts_.clear();
    for (const Outcome& outcome : pass.outcomes) {
      if (outcome.chunk.drafts == 0 || outcome.draws != outcome.chunk.drafts + size_t{1}) continue;
      drawn_texts_.push_back({outcome.chunk.request, static_cast<int32_t>(outcome.first_draw),
                              outcome.chunk.drafts + 1});
    }
    parts_.drafter->begin_next(drawn_texts_);
  } catch (...) {
    give_up(*std::exchange(next_, nullptr));
    throw;
  }
}

// Forgets the drafts of a pass that could not be started, and the pass.
void TextEngine::give_up_drafts() {
  parts_.drafter->abandon();
  parts_.runner->abandon();
}

// Starts at the request's last token.
TextEngine::DraftWalk TextEngine::begin_walk(const Outcome& outcome) const {
  const Request& request = *outcome.chunk.request;
  DraftWalk walk;
  if (outcome.chunk.drafts > 0) walk.given = parts_.drafter->accepted_anyway(request);
  return walk;
}

// Goes to the draft that the token drawn last is, which joins the text. Returns false if there is
// none, or if the token ends the request.
bool TextEngine::follow(Outcome& outcome, DraftWalk& walk) const {
  if (outcome.chunk.drafts == 0) return false;
  Request& request = *outcome.chunk.request;
  int32_t& token = outcome.sampled.back().token;
  if (walk.node < walk.given) token = request.drafts.tokens[static_cast<size_t>(walk.node) + 1];
  const int32_t next = request.drafts.find(walk.node, token);
  if (next < 0) return false;
  if (walk.node == 0) walk.ahead = request.grammar;
  const bool ends_value = read_by_grammar(walk.ahead, token);
  request.tokens.push_back(token);
  if (ends_value || finish_reason(request, token) != FinishReason::none) return false;
  outcome.accepted.push_back(walk.node = next);
  return true;
}

// Draws the request's next token, and with drafts the tokens after it, up to the first one that is
// no draft or ends the request. Each draw sees the text before it, as without drafts.
void TextEngine::draw_tokens(Outcome& outcome, Sampler& sampler) const {
  Request& request = *outcome.chunk.request;
  const size_t end = outcome.first_row + static_cast<size_t>(outcome.logit_rows);
  const size_t first = end - 1 - static_cast<size_t>(outcome.chunk.drafts);
  const Restored restored{request.tokens, request.tokens.size()};
  DraftWalk walk = begin_walk(outcome);
  grammar::TokenMask allowed;
  do {
    const auto [prompt, output] = request.parts();
    allowed_tokens(walk.node == 0 ? request.grammar : walk.ahead, allowed);
    outcome.sampled.push_back(sampler.sample(logit_rows(first + static_cast<size_t>(walk.node), 1),
                                             request.sampling,
                                             TokenHistory{prompt, output, end_tokens(), allowed}));
  } while (follow(outcome, walk));
}

// Takes the tokens that the runner drew after each row, as draw_tokens() would draw them.
void TextEngine::take_drawn(Outcome& outcome) const {
  Request& request = *outcome.chunk.request;
  const Restored restored{request.tokens, request.tokens.size()};
  DraftWalk walk = begin_walk(outcome);
  do {
    outcome.sampled.push_back({outcome.drawn[static_cast<size_t>(walk.node)]});
  } while (follow(outcome, walk));
}

// Makes the rows of accepted drafts consecutive, as keep_text() expects them.
void TextEngine::move_accepted(const EnginePass& pass) {
  if (!parts_.draft_rows) return;
  for (const Outcome& outcome : pass.outcomes) {
    const Request& request = *outcome.chunk.request;
    if (request.ended || outcome.preemptions != request.preemptions) continue;
    parts_.draft_rows->add(request.lease, outcome.chunk.begin, outcome.accepted);
  }
  parts_.draft_rows->move();
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
