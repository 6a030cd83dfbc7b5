// SPDX-License-Identifier: Apache-2.0
// An engine whose steps a test can hold up or make fail.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "fovea/engine.h"

namespace fovea {

class WrappedEngine final : public Engine {
 public:
  // `before_step` runs before every step that has requests; what it throws, the step throws.
  WrappedEngine(std::unique_ptr<Engine> inner, std::function<void()> before_step)
      : inner_(std::move(inner)), before_step_(std::move(before_step)) {}

  int64_t add(const GenerateRequest& request) override { return inner_->add(request); }
  void check(const GenerateRequest& request) const override { inner_->check(request); }
  void cancel(int64_t request) override { inner_->cancel(request); }
  bool idle() const override { return inner_->idle(); }
  std::vector<TokenEvent> step() override {
    if (!inner_->idle()) before_step_();
    return inner_->step();
  }
  void clear_prefix_cache() override { inner_->clear_prefix_cache(); }
  std::vector<GenerateResult> generate(std::span<const GenerateRequest> requests,
                                       const std::function<void(const TokenEvent&)>& on_token,
                                       const std::function<bool()>& stop) override {
    return inner_->generate(requests, on_token, stop);
  }
  std::vector<float> logits(std::span<const int32_t> tokens) override {
    return inner_->logits(tokens);
  }
  std::vector<int32_t> encode(std::string_view text) const override { return inner_->encode(text); }
  std::vector<int32_t> encode_bare(std::string_view text) const override {
    return inner_->encode_bare(text);
  }
  std::vector<int32_t> encode_chat(const ChatPrompt& prompt) const override {
    return inner_->encode_chat(prompt);
  }
  std::vector<int32_t> encode_conversation(const Conversation& conversation) const override {
    return inner_->encode_conversation(conversation);
  }
  ToolCallFormat tool_call_format() const override { return inner_->tool_call_format(); }
  std::string decode(std::span<const int32_t> tokens) const override {
    return inner_->decode(tokens);
  }
  std::string token_bytes(int32_t token) const override { return inner_->token_bytes(token); }
  std::span<const int32_t> end_tokens() const override { return inner_->end_tokens(); }
  int32_t vocabulary() const override { return inner_->vocabulary(); }
  int32_t max_context() const override { return inner_->max_context(); }
  int32_t wanted_context() const override { return inner_->wanted_context(); }
  const EngineStats& stats() const override { return inner_->stats(); }
  std::span<const std::string> notes() const override { return inner_->notes(); }
  bool has_text() const override { return inner_->has_text(); }
  std::span<const GroupSelection> selections() const override { return inner_->selections(); }
  std::string explain() const override { return inner_->explain(); }

 private:
  std::unique_ptr<Engine> inner_;
  std::function<void()> before_step_;
};

}  // namespace fovea
