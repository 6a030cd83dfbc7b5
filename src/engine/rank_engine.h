// SPDX-License-Identifier: Apache-2.0
// The common part of engines that consist of ranks: rank 0 answers what does not communicate. After
// a failure steps throw its reason, but requests can still be cancelled, and get their last event.
#pragma once

#include <cstdint>
#include <iterator>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.h"
#include "fovea/engine.h"

namespace fovea {

class RankEngine : public Engine {
 public:
  bool idle() const override {
    return events_.empty() && (failure_ ? unfinished_.empty() : first().idle());
  }
  void check(const GenerateRequest& request) const override { first().check(request); }
  std::vector<int32_t> encode(std::string_view text) const override { return first().encode(text); }
  std::vector<int32_t> encode_bare(std::string_view text) const override {
    return first().encode_bare(text);
  }
  std::vector<int32_t> encode_chat(const ChatPrompt& prompt) const override {
    return first().encode_chat(prompt);
  }
  std::vector<int32_t> encode_conversation(const Conversation& conversation) const override {
    return first().encode_conversation(conversation);
  }
  ToolCallFormat tool_call_format() const override { return first().tool_call_format(); }
  std::string decode(std::span<const int32_t> tokens) const override {
    return first().decode(tokens);
  }
  std::string token_bytes(int32_t token) const override { return first().token_bytes(token); }
  std::span<const int32_t> end_tokens() const override { return first().end_tokens(); }
  int32_t vocabulary() const override { return first().vocabulary(); }
  int32_t max_context() const override { return first().max_context(); }
  int32_t wanted_context() const override { return first().wanted_context(); }
  std::span<const std::string> notes() const override { return first().notes(); }
  bool has_text() const override { return first().has_text(); }
  std::span<const GroupSelection> selections() const override { return first().selections(); }

 protected:
  virtual Engine& first() const = 0;

  void throw_if_failed() const {
    if (failure_) fail(ErrorCode::device_failure, "{}", *failure_);
  }
  void note_added(int64_t request) {
    next_id_ = request + 1;
    unfinished_.insert(request);
  }
  // Does what cancel() has to do after a failure; returns false if there was none.
  bool cancel_after_failure(int64_t request) {
    if (!failure_) return false;
    if (unfinished_.erase(request) == 0) return true;
    TokenEvent& event = events_.emplace_back();
    event.request = request;
    event.finish = FinishReason::cancelled;
    return true;
  }
  // Returns the result of step(): events that were kept, then those of this step.
  std::vector<TokenEvent> take_events(std::vector<TokenEvent> fresh = {}) {
    for (const TokenEvent& event : fresh) {
      if (event.finish != FinishReason::none) unfinished_.erase(event.request);
    }
    std::vector<TokenEvent> result = std::exchange(events_, {});
    result.insert(result.end(), std::make_move_iterator(fresh.begin()),
                  std::make_move_iterator(fresh.end()));
    return result;
  }

  // Weights that ranks map from one file count once.
  static void add_memory(EngineMemory& sum, const EngineMemory& other, bool owns_weights) {
    if (owns_weights) sum.weights += other.weights;
    sum.caches += other.caches;
    sum.activations += other.activations;
    sum.positions += other.positions;
    sum.attention += other.attention;
    sum.logits += other.logits;
    sum.products += other.products;
    sum.batch += other.batch;
    sum.graphs += other.graphs;
    sum.drafter += other.drafter;
  }

  int64_t next_id_ = 1;
  std::vector<TokenEvent> events_;  // kept by generate() or cancel(), not yet returned by step()
  std::optional<std::string> failure_;

 private:
  std::set<int64_t> unfinished_;
};

}  // namespace fovea
