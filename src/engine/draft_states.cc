// SPDX-License-Identifier: Apache-2.0
#include "engine/draft_states.h"

#include <algorithm>
#include <new>
#include <optional>
#include <span>
#include <utility>

#include "fovea/error.h"

namespace fovea {
namespace {

SamplingParams rules_of_draws(const SamplingParams& sampling) {
  SamplingParams rules;
  rules.temperature = sampling.temperature;
  rules.top_k = sampling.top_k;
  rules.top_p = sampling.top_p;
  rules.min_p = sampling.min_p;
  rules.seed = sampling.seed;
  return rules;
}

}  // namespace

Drafting DraftStates::begin(Request& request, int32_t max_drafts) {
  request.drafts.begin(request.tokens.back());
  const int32_t skipped = is_head_ ? 1 : 0;
  const int32_t length = request.length() - skipped;
  const int32_t room = limits_.max_kv_len - length;
  const int32_t wanted = std::min({max_drafts, request.max_drafts(), room});
  if (wanted <= 0 || length == 0) return {};
  DraftState& state = states_[request.id];
  if (state.lease.row == 0 && !admit(request, state)) return {};
  const auto text = std::span(request.tokens).subspan(static_cast<size_t>(skipped));
  const auto same = std::ranges::mismatch(state.tokens, text).in1;
  // The last token is computed again if need be, because its logits give the first draft.
  auto kept = std::min<int64_t>(same - state.tokens.begin(), length - 1);
  if (is_head_) kept = std::min<int64_t>(kept, state.exact);
  state.exact = length;
  state.tokens.resize(static_cast<size_t>(kept));
  return {.request = &request,
          .state = &state,
          .begin = static_cast<int32_t>(kept),
          .wanted = wanted,
          .skipped = skipped};
}

Drafting DraftStates::go_on(Request& request, int32_t tokens) {
  const auto found = states_.find(request.id);
  if (found == states_.end()) return {};
  DraftState& state = found->second;
  const int32_t skipped = is_head_ ? 1 : 0;
  const int32_t begin = request.length() - skipped;
  const bool computed = state.exact == begin && state.tokens.size() >= static_cast<size_t>(begin);
  if (!computed || begin + tokens > limits_.max_kv_len) return {};
  if (!caches_.extend(state.lease, begin, begin + tokens)) return {};
  return {.request = &request, .state = &state, .begin = begin, .skipped = skipped};
}

bool DraftStates::admit(const Request& request, DraftState& state) {
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

void DraftStates::drop(Drafting& drafting) {
  drafting.wanted = 0;
  drafting.state = nullptr;
  forget(drafting.request->id);
}

void DraftStates::forget(int64_t request) {
  const auto found = states_.find(request);
  if (found == states_.end()) return;
  DraftState& state = found->second;
  const size_t known = std::min(state.tokens.size(), static_cast<size_t>(state.exact));
  try {
    caches_.publish(state.lease, {std::span(state.tokens).first(known), state.salt});
  } catch (const std::bad_alloc&) {  // costs a later request time only
  } catch (const Error& error) {
    if (error.code() != ErrorCode::out_of_memory) throw;
  }
  caches_.release(state.lease);
  states_.erase(found);
}

void DraftStates::undo(const Drafting& drafting) {
  if (drafting.state == nullptr) return;
  std::vector<int32_t>& text = drafting.state->tokens;
  text.resize(std::min(text.size(), static_cast<size_t>(drafting.begin)));
}

}  // namespace fovea
