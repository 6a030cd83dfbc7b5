// SPDX-License-Identifier: Apache-2.0
// Requests with a JSON schema, and conversations.
#include <algorithm>
#include <utility>
#include <vector>

#include "core/check.h"
#include "engine/text_engine.h"

namespace fovea {

std::shared_ptr<const grammar::Grammar> TextEngine::compile_schema(
    const SamplingParams& sampling) const {
  if (sampling.json_schema.empty()) return nullptr;
  tokenizer();
  return grammars_->compile(sampling.json_schema);
}

// Sets no mask if there is no schema.
void TextEngine::allowed_tokens(const Grammar& grammar, grammar::TokenMask& allowed) const {
  allowed.clear();
  if (!grammar) return;
  grammar->mask(static_cast<size_t>(vocabulary()), allowed);
  if (grammar->is_complete()) {
    for (const int32_t token : end_tokens()) grammar::allow(token, allowed);
  }
}

// Enqueues the draws of requests with a schema in the pass in flight. The tokens before them are
// known now, and the pass is running meanwhile.
void TextEngine::draw_masked() {
  if (next_ == nullptr || next_->masked_draws == 0) return;
  try {
    masks_.resize(std::max(masks_.size(), next_->masked_draws));
    std::vector<std::pair<const Outcome*, std::span<grammar::TokenMask>>> wanted;
    size_t first = 0;
    for (const Outcome& outcome : next_->outcomes) {
      if (!outcome.masked) continue;
      wanted.emplace_back(&outcome, std::span(masks_).subspan(first, outcome.draws));
      first += outcome.draws;
    }
    parts_.threads->parallel_for(static_cast<int64_t>(wanted.size()), [&](int64_t i, int) {
      const auto& [outcome, masks] = wanted[static_cast<size_t>(i)];
      find_masks(*outcome, masks);
    });
    parts_.runner->draw_masked(std::span(masks_).first(first));
  } catch (...) {
    give_up(*std::exchange(next_, nullptr));
    throw;
  }
}

// Finds the masks of a request's token and of the tokens after its drafts. Draws after the end of
// the value, or after a draft that the schema does not allow, may have any token: they are not
// read.
void TextEngine::find_masks(const Outcome& outcome, std::span<grammar::TokenMask> masks) const {
  for (grammar::TokenMask& mask : masks) mask.clear();
  const Request& request = *outcome.chunk.request;
  if (request.ended) return;
  std::vector<Grammar> ahead(masks.size());  // after each draft; unset: its draw is not read
  ahead[0] = request.grammar;
  for (size_t node = 0; node < masks.size(); ++node) {
    if (node > 0) {
      const auto parent = static_cast<size_t>(request.drafts.parent(static_cast<int32_t>(node)));
      const int32_t draft = request.drafts.tokens[node];
      if (draft == DraftTree::kUnknown || !ahead[parent]) continue;
      if (!grammar::has(masks[parent], draft)) continue;
      if (std::ranges::count(end_tokens(), draft) > 0) continue;
      ahead[node] = ahead[parent];
      if (!ahead[node]->accept(parts_.tokenizer->token_bytes(draft)) ||
          !ahead[node]->may_continue()) {
        ahead[node].reset();
        continue;
      }
    }
    allowed_tokens(ahead[node], masks[node]);
  }
}

// Returns true if the token ends the value of the schema.
bool TextEngine::read_by_grammar(Grammar& grammar, int32_t token) const {
  if (!grammar || std::ranges::find(end_tokens(), token) != end_tokens().end()) return false;
  if (!grammar->accept(parts_.tokenizer->token_bytes(token)))
    fail(ErrorCode::invalid_argument, "json_schema: it nests values too deeply for token {}",
         token);
  return !grammar->may_continue();
}

std::vector<int32_t> TextEngine::encode_conversation(const Conversation& conversation) const {
  return tokenizer().encode_bare(parts_.chat.render(conversation));
}

}  // namespace fovea
