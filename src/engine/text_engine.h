// SPDX-License-Identifier: Apache-2.0
// The engine turns requests into chunks, chunks into logits, and logits into tokens and text.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/cache_set.h"
#include "engine/draft_rows.h"
#include "engine/drafter.h"
#include "engine/grammars.h"
#include "engine/model_runner.h"
#include "engine/request.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"
#include "engine/speculation_control.h"
#include "fovea/engine.h"
#include "fovea/error.h"
#include "fovea/thread_pool.h"
#include "tokenizer/chat_template.h"
#include "tokenizer/tokenizer.h"

namespace fovea {

// The parts that Engine::load builds, in order.
struct EngineParts {
  std::unique_ptr<BackendRegistry> own_registry;  // set if EngineOptions::registry is not
  std::unique_ptr<ThreadPool> threads;
  std::unique_ptr<Model> model;
  std::optional<Tokenizer> tokenizer;
  std::optional<Error> why_no_tokenizer;  // set if `tokenizer` is null
  ChatTemplate chat;
  std::unique_ptr<CacheSet> caches;
  std::vector<GroupSelection> selections;
  std::unique_ptr<ModelRunner> runner;
  SchedulerLimits limits;
  RequestLimits request_limits;
  size_t weight_bytes = 0, cache_bytes = 0;
  bool overlap = false, record_steps = false;
  std::unique_ptr<Model> draft_model;  // null: the drafter, if there is one, needs none
  std::unique_ptr<Drafter> drafter;    // null: no speculation
  size_t drafter_bytes = 0;
  bool always_speculate = false;
  int32_t draft_branches = 1;
  std::unique_ptr<DraftRows> draft_rows;  // with several branches
  std::vector<std::string> notes;
};

class TextEngine final : public Engine {
 public:
  explicit TextEngine(EngineParts parts);

  int64_t add(const GenerateRequest& request) override;
  void check(const GenerateRequest& request) const override;
  void cancel(int64_t request) override;
  bool idle() const override { return scheduler_.idle() && events_.empty(); }
  std::vector<TokenEvent> step() override;
  void clear_prefix_cache() override {
    parts_.caches->clear();
    if (parts_.drafter) parts_.drafter->clear();
  }
  std::vector<GenerateResult> generate(std::span<const GenerateRequest> requests,
                                       const std::function<void(const TokenEvent&)>& on_token,
                                       const std::function<bool()>& stop) override;
  std::vector<float> logits(std::span<const int32_t> tokens) override;
  std::vector<int32_t> encode(std::string_view text) const override;
  std::vector<int32_t> encode_bare(std::string_view text) const override;
  std::vector<int32_t> encode_chat(const ChatPrompt& prompt) const override;
  std::vector<int32_t> encode_conversation(const Conversation& conversation) const override;
  ToolCallFormat tool_call_format() const override { return parts_.chat.tool_call_format(); }
  std::string decode(std::span<const int32_t> tokens) const override;
  std::string token_bytes(int32_t token) const override;
  std::span<const int32_t> end_tokens() const override { return parts_.model->info().eos_tokens; }
  int32_t vocabulary() const override { return parts_.request_limits.vocabulary; }
  int32_t max_context() const override { return parts_.request_limits.max_context; }
  int32_t wanted_context() const override { return parts_.request_limits.wanted_context; }
  std::span<const std::string> notes() const override { return parts_.notes; }
  bool has_text() const override { return parts_.tokenizer.has_value(); }
  const EngineStats& stats() const override;
  std::vector<StepRecord> take_step_records() override { return std::exchange(records_, {}); }
  std::span<const GroupSelection> selections() const override { return parts_.selections; }
  std::string explain() const override;

 private:
  using Clock = std::chrono::steady_clock;

  // A chunk of a pass and its results.
  struct Outcome {
    Chunk chunk;
    int32_t logit_rows = 0;
    size_t first_row = 0;
    int32_t preemptions = 0;  // the request's; unchanged while its lease is that of the pass
    bool gives_token = false;
    size_t first_draw = 0, draws = 0;  // its entries in the pass's list of draws
    bool masked = false;               // the runner draws from the tokens that a schema allows
    std::span<const int32_t> drawn;    // the tokens after each of its rows, if the runner drew them
    // The next tokens: accepted drafts, and the token drawn after them.
    std::vector<SampledToken> sampled;
    std::vector<int32_t> accepted;  // the nodes of the request's drafts that are accepted
    std::string failure;  // reason why the request fails after them; empty if it continues
  };
  // A pass from its enqueueing to its events.
  struct EnginePass {
    std::vector<Outcome> outcomes;
    size_t logit_rows = 0, draws = 0;
    size_t masked_draws = 0;
    bool needs_logits = false;   // the host draws or scores tokens
    bool offers_prefix = false;  // its end offers prompt pages to the prefix cache
    int32_t draft_width = 0;     // max drafts of a request
    StepRecord record;
  };

  std::vector<int32_t> checked_tokens(const GenerateRequest& request) const;
  bool start_pass(bool ahead);
  std::span<const Chunk> schedule(bool ahead);
  void add_drafts(EnginePass& pass, std::span<const Chunk> chunks);
  void finish_drafts(EnginePass& pass);
  void begin_next_drafts(EnginePass& pass);
  void give_up_drafts();
  bool can_run_ahead(const EnginePass& pass) const;
  PassPart add_chunk(EnginePass& pass, const Chunk& chunk) const;
  void finish_pass(EnginePass& pass);
  void find_drawn(EnginePass& pass);
  void settle(EnginePass& pass);
  void give_up(EnginePass& pass);
  void preempt_all();
  double now() const;
  const Tokenizer& tokenizer() const;  // throws Error with the reason if there is none
  // Returns null if the request has no schema.
  std::shared_ptr<const grammar::Grammar> compile_schema(const SamplingParams& sampling) const;
  using Grammar = std::optional<grammar::GrammarState>;
  void allowed_tokens(const Grammar& grammar, grammar::TokenMask& allowed) const;
  void draw_masked();
  void find_masks(const Outcome& outcome, std::span<grammar::TokenMask> masks) const;
  bool read_by_grammar(Grammar& grammar, int32_t token) const;
  std::string text_of(Request& request, int32_t token) const;
  // A walk from a request's last token along the drafts that its draws accept.
  struct DraftWalk {
    int32_t node = 0;    // the draft reached last
    int32_t given = -1;  // so many drafts are accepted whatever is drawn
    Grammar ahead;       // after the drafts, if there are any
  };
  void sample_pass(EnginePass& pass);
  void sample(Outcome& outcome, bool has_logits, Sampler& sampler);
  void score_prompt(const Outcome& outcome, Sampler& sampler) const;
  void draw_tokens(Outcome& outcome, Sampler& sampler) const;
  void take_drawn(Outcome& outcome) const;
  DraftWalk begin_walk(const Outcome& outcome) const;
  bool follow(Outcome& outcome, DraftWalk& walk) const;
  void count_pass(EnginePass& pass, const PassTimes& times);
  void count_drafts(EnginePass& pass, double seconds);
  void deliver(Outcome& outcome);
  bool accept(Outcome& outcome);
  void move_accepted(const EnginePass& pass);
  void keep_text(const Outcome& outcome);
  bool emit(const Outcome& outcome, SampledToken& sampled);
  FinishReason finish_reason(const Request& request, int32_t token) const;
  void fail_request(int64_t id, std::string why);
  void end_request(int64_t id, TokenEvent event);
  std::span<float> logit_rows(size_t first, size_t count) const;
  CacheLease admit_alone(std::span<const int32_t> tokens);
  std::string explain_waits() const;

  EngineParts parts_;
  std::unique_ptr<Grammars> grammars_;  // unset if there is no tokenizer
  Scheduler scheduler_;
  std::vector<Sampler> samplers_;  // one per thread
  // [SchedulerLimits::logit_rows(), vocabulary]; unused rows cost no memory.
  std::unique_ptr<float[]> logits_;
  bool overlap_ = false;
  EnginePass passes_[2];
  EnginePass* next_ = nullptr;  // the pass in flight that the next step() finishes
  // Requests that ended while a pass in flight computes a token of theirs.
  std::vector<std::unique_ptr<Request>> ended_;
  std::vector<PassPart> parts_of_pass_;
  SpeculationControl control_;
  std::vector<Request*> drafting_;       // requests with drafts in the pass that is scheduled
  std::vector<size_t> drafting_chunks_;  // their chunks
  std::vector<DrawnText> drawn_texts_;   // scratch
  std::vector<int32_t> drawn_;
  std::vector<grammar::TokenMask> masks_;  // scratch
  std::vector<TokenEvent> events_;         // not yet returned to the caller
  int64_t next_id_ = 1;
  int64_t started_passes_ = 0;
  double counted_until_ = 0;  // time up to which stats_ has counted passes
  Clock::time_point loaded_ = Clock::now();
  std::vector<StepRecord> records_;
  mutable EngineStats stats_;
};

}  // namespace fovea
