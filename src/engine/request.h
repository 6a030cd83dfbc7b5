// SPDX-License-Identifier: Apache-2.0
// One request, from add() to its last token.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/cache_set.h"
#include "engine/draft_tree.h"
#include "engine/logit_changes.h"
#include "engine/stop_matcher.h"
#include "fovea/engine.h"
#include "tokenizer/grammar/grammar.h"
#include "tokenizer/tokenizer.h"

namespace fovea {

struct Request {
  int64_t id = 0;
  SamplingParams sampling;
  std::string salt;
  std::vector<int32_t> tokens;  // the prompt, then generated tokens
  int32_t prompt_tokens = 0;
  int32_t max_length = std::numeric_limits<int32_t>::max();  // tokens at which it ends
  // Tokens in the caches once all enqueued passes have run.
  int32_t computed = 0;
  CacheLease lease;
  int32_t passes = 0;       // passes in flight that compute its tokens
  int32_t pending = 0;      // tokens that passes in flight draw
  int32_t drawn_by = -1;    // with `pending`: its part in the pass enqueued last
  DraftTree drafts;         // while a pass verifies them
  int32_t preemptions = 0;  // tells passes over an earlier lease from those over this one
  bool ended = false;       // its last event is queued; passes in flight still refer to it
  int32_t retried_at = -1;  // value of `computed` when the request last ran out of memory alone
  std::optional<int32_t> cached_tokens;  // cached prompt tokens at the first admission
  std::vector<float> prompt_logprobs;    // [prompt_tokens], set if sampling.prompt_logprobs
  std::vector<std::vector<TokenLogprob>> prompt_top;  // likewise, if sampling.logprobs > 0
  std::optional<TokenStream> characters;              // unset if the engine has no tokenizer
  StopMatcher stops{{}};
  std::optional<grammar::GrammarState> grammar;  // set if sampling.json_schema is

  int32_t length() const { return static_cast<int32_t>(tokens.size()); }
  int32_t generated() const { return length() - prompt_tokens; }
  std::pair<std::span<const int32_t>, std::span<const int32_t>> parts() const {
    const std::span<const int32_t> all = tokens;
    const auto prompt = static_cast<size_t>(prompt_tokens);
    return {all.first(prompt), all.subspan(prompt)};
  }
  // Returns the tokens including those that passes in flight draw.
  int32_t scheduled() const { return length() + pending; }
  int32_t remaining() const { return scheduled() - computed; }
  // Returns true if the tokens that passes in flight draw are its last.
  bool draws_last() const { return scheduled() >= max_length; }
  // Returns how many drafts can become text: the token after them is the last one at the latest.
  int32_t max_drafts() const { return max_length - length() - 1; }
  // Returns true if the first pass over the prompt also scores its tokens.
  bool scores_prompt() const { return sampling.prompt_logprobs && generated() == 0; }
  // Returns true if the next token must be drawn on the host.
  bool draws_on_host() const {
    return scores_prompt() || sampling.logprobs >= 0 || changes_logits(sampling, generated());
  }
  // Returns the text withheld so far: incomplete characters, and beginnings of stop strings.
  std::string held_text() {
    std::string text;
    if (characters) text = stops.push(characters->finish());
    return text += stops.finish();
  }
};

struct RequestLimits {
  int32_t vocabulary = 0;
  int32_t max_context = 0;
  int32_t wanted_context = 0;  // requested by the model or the caller; may exceed the KV budget
};

// Throws Error{invalid_argument} naming the field, its value and the limit.
void check_sampling_params(const SamplingParams& params, int32_t vocabulary);
void check_tokens(std::span<const int32_t> tokens, int32_t vocabulary);
void check_prompt(std::span<const int32_t> tokens, const RequestLimits& limits);

}  // namespace fovea
