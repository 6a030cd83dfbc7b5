// SPDX-License-Identifier: Apache-2.0
// One forward pass: from tokens and leases to logits.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/cache_set.h"
#include "engine/group_backends.h"
#include "fovea/engine.h"
#include "model/model.h"
#include "tokenizer/grammar/grammar.h"

namespace fovea {

// Tokens that the last pass of a model's runner drew, and those of its drafter's runner, in memory
// of their device. A pass of either takes tokens of both.
struct DrawnLists {
  int32_t* model = nullptr;
  int32_t* drafter = nullptr;
};

// New tokens of one request, stored as its tokens [begin, begin + tokens). The lease already covers
// them.
// The caller wants the logits of the last logit_rows tokens; with `sampling`, it wants only the
// tokens drawn from them, each at the position after its row.
struct PassPart {
  std::span<const int32_t> tokens;
  int32_t begin = 0;
  const CacheLease* lease = nullptr;
  int32_t logit_rows = 0;
  const SamplingParams* sampling = nullptr;  // has no logprobs, and logit_rows is at least 1
  // With `sampling`: draw_masked() draws its tokens, once the caller knows which ones may follow.
  bool masked = false;
  // If not negative, the draw of the pass enqueued before that is this part's only token. The value
  // in `tokens` is then ignored.
  int32_t drawn_by = -1;
  // The last `taken` tokens are draws of the other runner's last pass, from `taken_from` on.
  int32_t taken_from = 0, taken = 0;
  std::span<const int32_t> features = {};  // for a head: one a token, see ModelInputs
  // Tokens between the last one that a row has read and the one drawn from it: 1 for a head, whose
  // inputs at a position are features of it and the token after it.
  int32_t skipped = 0;
  // The token before each one, by its number among `tokens`; -1: the request's token begin - 1.
  // Tokens see their ancestors only, and there are at most kMaxDraftNodes. Empty: a chain.
  std::span<const int32_t> parents = {};

  // Returns the number of tokens of the part before this one in its text.
  int32_t depth(int32_t token) const {
    if (parents.empty()) return token;
    int32_t depth = 0;
    while ((token = parents[static_cast<size_t>(token)]) >= 0) ++depth;
    return depth;
  }
  // Returns the number of its entries in the list of draws of the pass; without `sampling` there is
  // one, which draws nothing.
  int32_t draws() const { return sampling != nullptr ? logit_rows : 1; }
  // Returns the position of the token that row `row` of its logits gives.
  int32_t drawn_position(int32_t row) const {
    const int32_t token = static_cast<int32_t>(tokens.size()) - logit_rows + row;
    return begin + depth(token) + 1 + skipped;
  }
};

// Returns the number of entries in the list of draws of a pass.
inline int32_t count_draws(std::span<const PassPart> parts) {
  int32_t draws = 0;
  for (const PassPart& part : parts) draws += part.draws();
  return draws;
}

// When a pass ran on the device.
struct PassTimes {
  std::chrono::steady_clock::time_point begin, end;
  double seconds() const { return std::chrono::duration<double>(end - begin).count(); }
};

struct RunnerStats {
  EngineMemory memory;  // everything but weights and caches
  EngineGraphs graphs;
  int64_t shared_steps = 0;  // number of passes that named shared prefixes
};

class ModelRunner {
 public:
  virtual ~ModelRunner() = default;

  // Enqueues the parts as one batch within the limits. At most one other pass may be in flight, and
  // only if draws() is true; its masked draws must be enqueued. The parts are not read after the
  // call. If it throws, nothing was enqueued.
  virtual void enqueue(std::span<const PassPart> parts) = 0;
  // Enqueues the draws of the masked parts of the pass in flight, the only one, which must have
  // such parts. masks: one for each of these draws, part after part, with a bit for each token that
  // may be drawn; an empty one allows every token. They are not read after the call. If it throws,
  // the pass must be abandoned.
  virtual void draw_masked(std::span<const grammar::TokenMask> masks) = 0;
  // Waits for the oldest pass in flight, whose masked draws must be enqueued. logits: [sum of
  // logit_rows, vocabulary], in the order of the parts, or empty; must be empty if another pass was
  // enqueued since. drawn: [count_draws()],
  // the tokens drawn by the rules of Sampler, part after part, or -1 if the caller has to draw the
  // token: the part has no `sampling`, the runner does not draw, or the logits are no distribution.
  // The logits of a drawn token are unspecified.
  virtual PassTimes collect(std::span<float> logits, std::span<int32_t> drawn) = 0;
  // Returns true if draws find the likeliest tokens of their rows, too.
  virtual bool finds_likeliest() const { return false; }
  // Returns them for a draw of the pass collected last, the likeliest first, until the next pass is
  // enqueued. They mean nothing if no token was drawn.
  virtual std::span<const TokenLogprob> likeliest(size_t /*draw*/) const { return {}; }
  // Waits for all passes in flight and forgets them.
  virtual void abandon() = 0;
  // Returns the lists of drawn tokens, which a drafter's runner shares.
  virtual DrawnLists drawn_lists() const = 0;
  // Returns true if tokens are drawn where the next pass can take them.
  virtual bool draws() const = 0;
  // Enqueues and collects one pass.
  PassTimes run(std::span<const PassPart> parts, std::span<float> logits, std::span<int32_t> drawn);
  virtual RunnerStats stats() const = 0;

 protected:
  static void check_masks(size_t passes, size_t masks, size_t draws);
};

struct ModelRunnerOptions {
  BatchLimits limits;
  // On a GPU, decode steps, and steps with small chunks of prompts, of up to this many requests are
  // padded to the sizes of graph_sizes.h.
  int32_t max_graph_requests = 0;
  bool cuda_graphs = true;  // replays captured steps; if false, enqueues them
  // Rows of logits computed at once, at least those of a decode step without drafts. On a GPU, a
  // pass with more computes its logits in several steps.
  int32_t logit_rows = 1;
  bool host_draws = false;  // on the CPU: the runner draws tokens, for passes enqueued ahead
  // On a GPU, passes of up to this many new tokens per request are padded to the sizes of
  // graph_sizes.h too. No part draws more tokens.
  int32_t max_width = 1;
  // On a GPU: backends allow the capture of passes with several new tokens per request. If false,
  // these are neither padded nor captured.
  bool captures_extends = true;
  bool masked_draws = false;  // on a GPU: parts may be masked
  int32_t likeliest = 0;      // on a GPU: draws find so many of the likeliest tokens, too
  bool trees = false;         // parts may have parents
  // Lists of drawn tokens that the runner makes: its own, and a drafter's. A drafter's runner makes
  // none, and has those of a runner with the same limits in `drawn`.
  int32_t drawn_lists = 1;
  DrawnLists drawn = {};
};

// Makes a runner for the device of the model. The model, caches and threads must outlive it. All
// allocation happens here.
std::unique_ptr<ModelRunner> make_model_runner(Model& model, CacheSet& caches, ThreadPool& threads,
                                               const std::vector<GroupSelection>& selections,
                                               const ModelRunnerOptions& options);

// Returns the bytes of the batch's arrays and of the request table on the CPU.
size_t host_batch_bytes(const BatchLimits& limits);

}  // namespace fovea
