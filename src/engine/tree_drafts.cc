// SPDX-License-Identifier: Apache-2.0
#include "engine/tree_drafts.h"

#include <algorithm>

#include "fovea/error.h"
#include "fovea/speculation.h"

namespace fovea {

double TreeDrafts::draft(std::span<Drafting> requests, int32_t branches) {
  branches_ = branches;
  device_seconds_ = 0;
  const int32_t max_tokens = states_.limits().max_tokens;
  size_t first = 0;
  int32_t needed = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    Drafting& drafting = requests[i];
    while (drafting.wanted > 0 && drafting.text_length() - drafting.computed() > max_tokens) {
      compute_text(drafting);
    }
    if (drafting.wanted == 0) continue;
    const int32_t text = drafting.text_length() - drafting.computed();
    const int32_t room = std::min(max_tokens, std::max(text, 1 + drafting.wanted));
    if (needed + room > max_tokens) {
      grow(requests.subspan(first, i - first));
      first = i;
      needed = 0;
    }
    needed += room;
  }
  grow(requests.subspan(first));
  return device_seconds_;
}

// Computes as much of a long text as a pass can.
void TreeDrafts::compute_text(Drafting& drafting) {
  const int32_t end = drafting.computed() + states_.limits().max_tokens;
  if (!states_.caches().extend(drafting.state->lease, drafting.begin, end)) {
    return states_.drop(drafting);
  }
  tokens_.clear();
  features_.clear();
  for (int32_t i = drafting.computed(); i < end; ++i) {
    add_token(drafting.text_token(i), states_.is_head() ? states_.features_of(drafting, i) : 0);
  }
  PassPart part{.tokens = tokens_, .begin = drafting.computed(), .lease = &drafting.state->lease};
  if (states_.is_head()) part.features = features_;
  int32_t drawn = -1;
  device_seconds_ += runner_.run({&part, 1}, {}, {&drawn, 1}).seconds();
  std::vector<int32_t>& text = drafting.state->tokens;
  text.insert(text.end(), tokens_.begin(), tokens_.end());
}

// Grows the trees of requests whose steps fit one pass each. All that still grow are in every pass,
// so that a head's hidden states are those of the pass before.
void TreeDrafts::grow(std::span<Drafting> requests) {
  growing_.clear();
  for (Drafting& drafting : requests) {
    if (drafting.wanted == 0) continue;
    const int32_t room = std::min(kMaxDraftNodes, states_.limits().max_tokens) - 1;
    growing_.push_back({&drafting, GrowingTree(drafting.request->tokens.back(), drafting.wanted,
                                               branches_, room)});
  }
  while (true) {
    tokens_.clear();
    features_.clear();
    parts_.clear();
    members_.clear();
    for (Growing& growing : growing_) {
      if (!growing.complete && choose(growing)) members_.push_back(&growing);
    }
    if (members_.empty()) break;
    run();
  }
  for (const Growing& growing : growing_) {
    if (growing.drafting->state != nullptr)
      growing.drafting->request->drafts = growing.tree.finish();
  }
}

// Adds the request's tokens to the next pass. Returns false if its tree is complete.
bool TreeDrafts::choose(Growing& growing) {
  Drafting& drafting = *growing.drafting;
  const bool begins = growing.hidden_row < 0;
  if (!begins && !growing.tree.choose()) {
    growing.complete = true;
    return false;
  }
  const int32_t end =
      drafting.text_length() - 1 + static_cast<int32_t>(growing.tree.tokens().size());
  if (!states_.caches().extend(drafting.state->lease, drafting.begin, end)) {
    states_.drop(drafting);
    growing.complete = true;
    return false;
  }
  begins ? add_text(growing) : add_tree(growing);
  return true;
}

void TreeDrafts::add_token(int32_t token, int32_t features) {
  tokens_.push_back(token);
  features_.push_back(features);
}

// The text that is not computed yet; its last token is the first of the tree.
void TreeDrafts::add_text(Growing& growing) {
  const Drafting& drafting = *growing.drafting;
  const int32_t begin = drafting.computed();
  for (int32_t i = begin; i < drafting.text_length(); ++i) {
    add_token(drafting.text_token(i), states_.is_head() ? states_.features_of(drafting, i) : 0);
  }
  parts_.push_back({.begin = begin, .lease = &drafting.state->lease, .logit_rows = 1});
}

void TreeDrafts::add_tree(Growing& growing) {
  const Drafting& drafting = *growing.drafting;
  const std::span<const int32_t> tokens = growing.tree.tokens(), parents = growing.tree.parents();
  const int32_t begin = drafting.text_length() - 1;
  for (size_t i = 0; i < tokens.size(); ++i) {
    int32_t features = 0;
    if (states_.is_head()) {
      features = i == 0 ? states_.features_of(drafting, begin)
                        : states_.hidden_state(growing.hidden_row + parents[i]);
    }
    add_token(tokens[i], features);
  }
  parts_.push_back({.begin = begin,
                    .lease = &drafting.state->lease,
                    .logit_rows = static_cast<int32_t>(tokens.size()),
                    .parents = parents});
}

// Runs the pass, and finds the children of the nodes that it computed for the first time.
void TreeDrafts::run() {
  const bool drawn_by_runner = runner_.finds_likeliest();
  size_t first = 0, rows = 0;
  for (size_t i = 0; i < parts_.size(); ++i) {
    const Drafting& drafting = *members_[i]->drafting;
    const auto count = parts_[i].parents.empty()
                           ? static_cast<size_t>(drafting.text_length() - parts_[i].begin)
                           : parts_[i].parents.size();
    parts_[i].tokens = std::span(tokens_).subspan(first, count);
    parts_[i].skipped = drafting.skipped;
    if (states_.is_head()) parts_[i].features = std::span(features_).subspan(first, count);
    if (drawn_by_runner) parts_[i].sampling = &drafting.state->sampling;
    first += count;
    rows += static_cast<size_t>(parts_[i].logit_rows);
  }
  drawn_.assign(static_cast<size_t>(count_draws(parts_)), -1);
  const size_t logits = drawn_by_runner ? 0 : rows * width_;
  device_seconds_ += runner_.run(parts_, {logits_.get(), logits}, drawn_).seconds();
  size_t row = 0;
  for (size_t i = 0; i < parts_.size(); ++i) {
    Growing& growing = *members_[i];
    std::vector<int32_t>& text = growing.drafting->state->tokens;
    const std::span<const int32_t> tokens = parts_[i].tokens;
    if (growing.hidden_row < 0) text.insert(text.end(), tokens.begin(), tokens.end());
    growing.hidden_row = static_cast<int32_t>(row);
    const int32_t count = parts_[i].logit_rows;
    for (int32_t place = count - growing.tree.chosen(); place < count; ++place) {
      const std::optional<SampledToken> drawn =
          draw(parts_[i], *growing.drafting->state, row, place);
      if (drawn) growing.tree.add_children(place, *drawn);
    }
    row += static_cast<size_t>(count);
  }
}

// Returns the token after a node of a part whose rows begin with `row`, with the likeliest ones.
// Returns nothing if its logits are no distribution.
std::optional<SampledToken> TreeDrafts::draw(const PassPart& part, const DraftState& state,
                                             size_t row, int32_t place) {
  row += static_cast<size_t>(place);
  if (runner_.finds_likeliest()) {
    if (drawn_[row] < 0) return {};
    const std::span<const TokenLogprob> top = runner_.likeliest(row);
    return SampledToken{.token = drawn_[row], .top = {top.begin(), top.end()}};
  }
  SamplingParams rules = state.sampling;
  rules.logprobs = branches_;
  try {
    return sampler_.sample({logits_.get() + row * width_, width_}, rules,
                           static_cast<uint64_t>(part.drawn_position(place)));
  } catch (const Error&) {
    return {};
  }
}

}  // namespace fovea
