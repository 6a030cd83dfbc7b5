// SPDX-License-Identifier: Apache-2.0
// Backends that fail in the middle of a pass: the faulty request ends, the others are not affected,
// nothing leaks.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/reference_text.h"
#include "fovea/engine.h"
#include "fovea/error.h"

namespace fovea {
namespace {

// A fault that hits a request of this length.
struct Fault {
  int32_t nan_at = -1;    // its attention output becomes NaN
  int32_t throw_at = -1;  // forward() throws
};

class FaultyBackend final : public AttentionBackend {
 public:
  FaultyBackend(std::unique_ptr<AttentionBackend> inner, const AttentionSpec& spec,
                const Fault& fault)
      : inner_(std::move(inner)), spec_(spec), fault_(fault) {}

  std::string_view name() const override { return "faulty"; }
  size_t workspace_bytes(const BatchLimits& limits) const override {
    return inner_->workspace_bytes(limits);
  }
  void reserve(const BatchLimits& limits, std::span<std::byte> workspace) override {
    inner_->reserve(limits, workspace);
  }
  void plan(const BatchView& batch, Stream stream) override {
    batch_ = batch;
    inner_->plan(batch, stream);
  }
  void forward(const LayerTensors& layer, Stream stream) override {
    inner_->forward(layer, stream);
    for (int32_t i = 0; i < batch_.requests; ++i) {
      if (batch_.kv_lens[i] == fault_.throw_at) throw std::runtime_error("the device is gone");
      if (batch_.kv_lens[i] != fault_.nan_at) continue;
      for (int32_t token = batch_.q_indptr[i]; token < batch_.q_indptr[i + 1]; ++token)
        for (int32_t head = 0; head < spec_.q_heads; ++head) {
          auto* row = reinterpret_cast<float*>(row_address(layer.out, token, head));
          std::fill_n(row, spec_.head_dim_v, std::nanf(""));
        }
    }
  }

 private:
  std::unique_ptr<AttentionBackend> inner_;
  AttentionSpec spec_;
  const Fault& fault_;
  BatchView batch_;
};

// The parameter tells whether passes overlap.
class FaultyEngine : public ::testing::TestWithParam<bool> {
 protected:
  FaultyEngine() : registry_(BackendRegistry::builtin()) {
    BackendEntry entry = *registry_.find("cpu");
    entry.name = "faulty";
    entry.aliases.clear();
    entry.create = [this, create = entry.create](const BackendContext& context) {
      return std::make_unique<FaultyBackend>(create(context), context.spec, fault_);
    };
    registry_.add(entry);
    EngineOptions options;
    options.model_path = model_folder("llama");
    options.registry = &registry_;
    options.backend = parse_backend_wish("faulty");
    options.kv_memory_bytes = size_t{32} << 20;
    options.max_context = 256;
    options.max_batch_tokens = 64;
    options.threads = 1;
    options.overlap = GetParam();
    engine_ = Engine::load(options);
    for (const ReferencePrompt& prompt : read_reference("llama")) prompts_.push_back(prompt);
    prompts_.resize(2);  // 7 and 33 tokens
  }

  GenerateRequest request(size_t index) const {
    GenerateRequest request = greedy_request(prompts_[index]);
    request.sampling.max_new_tokens = 20;
    return request;
  }

  // The logits of a pass are gone once the next one was enqueued.
  static std::string nan_error() {
    return GetParam() ? "the logits of the next token are NaN, +inf or all -inf"
                      : "the logit of token 0 is NaN";
  }

  void expect_healthy() {
    fault_ = {};
    EXPECT_TRUE(engine_->idle());
    for (size_t i = 0; i < prompts_.size(); ++i) {
      const GenerateRequest again = request(i);
      EXPECT_EQ(engine_->generate({&again, 1}).front().tokens,
                std::vector<int32_t>(prompts_[i].greedy.begin(), prompts_[i].greedy.begin() + 20));
    }
    engine_->clear_prefix_cache();
    EXPECT_EQ(engine_->stats().kv_pages_free, engine_->stats().kv_pages);
  }

  Fault fault_;
  BackendRegistry registry_;
  std::unique_ptr<Engine> engine_;
  std::vector<ReferencePrompt> prompts_;
};

TEST_P(FaultyEngine, NanLogitsEndTheirRequestOnly) {
  const int64_t good = engine_->add(request(0));
  const int64_t bad = engine_->add(request(1));
  fault_.nan_at = 33 + 5;
  std::vector<int32_t> tokens;
  int failures = 0;
  while (!engine_->idle()) {
    for (const TokenEvent& event : engine_->step()) {
      if (event.request == good) tokens.push_back(event.token);
      if (event.request != bad || event.finish == FinishReason::none) continue;
      EXPECT_EQ(event.finish, FinishReason::failed);
      EXPECT_EQ(event.token, -1);
      EXPECT_EQ(event.error, nan_error());
      ++failures;
    }
  }
  EXPECT_EQ(failures, 1);
  EXPECT_EQ(tokens,
            std::vector<int32_t>(prompts_[0].greedy.begin(), prompts_[0].greedy.begin() + 20));
  expect_healthy();
}

// Its earlier tokens and text remain, including text that a stop string held back.
TEST_P(FaultyEngine, GenerateReturnsTheOtherResultsIfARequestFails) {
  std::vector<GenerateRequest> requests = {request(1), request(0)};
  const std::vector<GenerateResult> whole = engine_->generate(requests);
  requests[0].sampling.stop = {whole[0].text + " and what never comes"};
  fault_.nan_at = 33 + 5;
  int failures = 0;
  const std::vector<GenerateResult> results = engine_->generate(
      requests, [&](const TokenEvent& event) { failures += event.finish == FinishReason::failed; });
  EXPECT_EQ(failures, 1);
  EXPECT_EQ(results[0].finish, FinishReason::failed);
  EXPECT_EQ(results[0].error, nan_error());
  EXPECT_EQ(results[0].prompt_tokens, 33);
  ASSERT_EQ(results[0].tokens.size(), 5u);
  EXPECT_EQ(results[0].text, engine_->decode(results[0].tokens));
  EXPECT_EQ(results[1].finish, FinishReason::length);
  EXPECT_EQ(results[1].error, "");
  EXPECT_EQ(results[1].tokens, whole[1].tokens);
  EXPECT_EQ(results[1].text, whole[1].text);
  expect_healthy();
}

TEST_P(FaultyEngine, NanInAPromptIsNotCached) {
  GenerateRequest bad = request(1);
  for (const bool scores : {false, true}) {
    bad.sampling.prompt_logprobs = scores;
    fault_.nan_at = 33;
    const GenerateResult result = engine_->generate({&bad, 1}).front();
    EXPECT_EQ(result.finish, FinishReason::failed);
    EXPECT_TRUE(result.tokens.empty());
    EXPECT_TRUE(result.prompt_logprobs.empty());
    expect_healthy();
  }
}

TEST_P(FaultyEngine, AFailedPassIsComputedAgain) {
  std::vector<int32_t> tokens;
  engine_->add(request(0));
  fault_.throw_at = 7 + 6;
  int errors = 0;
  while (!engine_->idle()) {
    try {
      for (const TokenEvent& event : engine_->step()) tokens.push_back(event.token);
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "the device is gone");
      ++errors;
      fault_.throw_at = -1;
    }
  }
  EXPECT_EQ(errors, 1);
  EXPECT_EQ(tokens,
            std::vector<int32_t>(prompts_[0].greedy.begin(), prompts_[0].greedy.begin() + 20));
  expect_healthy();
}

TEST_P(FaultyEngine, GenerateGivesUpWhatItStarted) {
  const std::vector<GenerateRequest> requests = {request(0), request(1)};
  fault_.throw_at = 33;
  EXPECT_THROW((void)engine_->generate(requests), std::runtime_error);
  expect_healthy();
  const std::vector<int32_t>& tokens = prompts_[1].tokens;
  fault_.throw_at = 33;
  EXPECT_THROW((void)engine_->logits(tokens), std::runtime_error);
  expect_healthy();
}

INSTANTIATE_TEST_SUITE_P(Passes, FaultyEngine, ::testing::Bool(), [](const auto& overlaps) {
  return std::string(overlaps.param ? "overlap" : "one_after_another");
});

}  // namespace
}  // namespace fovea
