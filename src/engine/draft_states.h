// SPDX-License-Identifier: Apache-2.0
// The requests that a draft model or a head drafts for, as its caches hold them.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/cache_set.h"
#include "engine/request.h"
#include "fovea/batch.h"

namespace fovea {

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
  int32_t begin = 0;    // tokens in the caches when the step began
  int32_t wanted = 0;   // drafts
  int32_t skipped = 0;  // tokens of the text before the draft model's first one
  int32_t computed() const { return static_cast<int32_t>(state->tokens.size()); }
  // Returns the draft model's tokens of the text without drafts.
  int32_t text_length() const { return request->length() - skipped; }
  int32_t text_token(int32_t position) const {
    return request->tokens[static_cast<size_t>(position + skipped)];
  }
};

class DraftStates {
 public:
  // `target` are the caches of the model that is drafted for.
  DraftStates(CacheSetOptions caches, const BatchLimits& limits, bool is_head, CacheSet& target)
      : caches_(std::move(caches)), limits_(limits), is_head_(is_head), target_(target) {}

  // Begins the request's drafts with its last token, and finds the part of its text that is in the
  // caches already. `wanted` is 0 if it gets no drafts.
  Drafting begin(Request& request, int32_t max_drafts);
  // Prepares the computation of the next `tokens` tokens of the request, which follow its text.
  // Without a state, the request cannot be computed: it lacks tokens before, or memory.
  Drafting go_on(Request& request, int32_t tokens);
  // Gives back the request's memory, after a step in which it found none, and its drafts to come.
  void drop(Drafting& drafting);
  // Leaves the text to the prefix cache.
  void forget(int64_t request);
  // Forgets what a step has computed that failed.
  static void undo(const Drafting& drafting);

  CacheSet& caches() { return caches_; }
  const BatchLimits& limits() const { return limits_; }
  bool is_head() const { return is_head_; }
  // Returns the row of a head's features of a token that the model has computed.
  int32_t features_of(const Drafting& drafting, int32_t position) const {
    const CacheLease& lease = drafting.request->lease;
    return target_.table().row(lease.row)[static_cast<size_t>(position)];
  }
  // Returns that of a logit row of the head's last pass: its own hidden state.
  int32_t hidden_state(int32_t row) const { return static_cast<int32_t>(target_.slots()) + row; }

 private:
  bool admit(const Request& request, DraftState& state);

  CacheSet caches_;
  BatchLimits limits_;
  bool is_head_;
  CacheSet& target_;
  std::unordered_map<int64_t, DraftState> states_;  // by the request's id
};

}  // namespace fovea
