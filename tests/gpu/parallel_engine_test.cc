// SPDX-License-Identifier: Apache-2.0
// Engines whose model, and contexts, are distributed over two GPUs. Skipped where there are fewer.
#include "fovea/parallel_engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "fovea/select_backend.h"
#include "gpu/exact_text.h"
#include "gpu/golden_logits.h"
#include "gpu/several_gpus.h"
#include "support/expect_error.h"
#include "support/golden_model.h"

namespace fovea {
namespace {

using test::expect_error;

// Model, and true if the ranks distribute contexts, too.
class ParallelGpuModels : public testing::TestWithParam<std::tuple<const char*, bool>> {
 protected:
  void SetUp() override { FOVEA_NEEDS_GPUS(2); }
  static std::string model() { return std::get<0>(GetParam()); }
  static ParallelOptions parallel() {
    return {.tensor_parallel = 2, .context_parallel = std::get<1>(GetParam()) ? 2 : 1};
  }
};

EngineOptions two_gpus(const std::string& model) {
  EngineOptions options = gpu_options(model);
  options.kv_memory_bytes *= 2;
  return options;
}

TEST_P(ParallelGpuModels, ContinueTheReferencePromptsColdWarmAndBatched) {
  ExactText exact(model());
  const auto engine = load_parallel_engine(two_gpus(model()), parallel());
  const std::vector<ReferencePrompt> prompts = read_reference(model());
  std::vector<GenerateRequest> requests;
  for (const ReferencePrompt& prompt : prompts) requests.push_back(greedy_request(prompt));
  for (size_t i = 0; i < prompts.size(); ++i) {
    const GenerateResult result = engine->generate({&requests[i], 1}).front();
    exact.expect_greedy(prompts[i], result.tokens, std::to_string(i) + " alone");
  }
  for (const bool warm : {false, true}) {
    if (!warm) engine->clear_prefix_cache();
    const std::vector<GenerateResult> results = engine->generate(requests);
    for (size_t i = 0; i < prompts.size(); ++i) {
      exact.expect_greedy(prompts[i], results[i].tokens,
                          std::to_string(i) + (warm ? " batched, warm" : " batched, cold"));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(TwoGpus, ParallelGpuModels,
                         testing::Combine(testing::ValuesIn(kTestModels), testing::Bool()));

TEST(ParallelGpuEngine, LogitsOfOtherArchitecturesAreThoseOfTheReference) {
  FOVEA_NEEDS_GPUS(2);
  for (const std::string& name : golden_models()) {
    SCOPED_TRACE(name);
    EngineOptions options = two_gpus(name);
    options.max_context = 512;
    options.max_batch_tokens = 61;
    expect_golden_logits(*load_parallel_engine(options, {.tensor_parallel = 2}), name);
  }
}

TEST(ParallelGpuEngine, ExpertsDividedByExpertsGiveTheReferencesText) {
  FOVEA_NEEDS_GPUS(2);
  for (const char* const model : {"gpt_oss", "llama4_text", "qwen3_next", "deepseek_v3"}) {
    ExactText exact(model);
    const auto engine =
        load_parallel_engine(two_gpus(model), {.tensor_parallel = 2, .expert_parallel = true});
    exact.expect_reference(*engine);
  }
}

TEST(ParallelGpuEngine, OverlappedAndSampledTokensAreEqualOnAllRanks) {
  FOVEA_NEEDS_GPUS(2);
  EngineOptions options = two_gpus("llama");
  options.overlap = true;
  const auto engine = load_parallel_engine(options, {.tensor_parallel = 2});
  std::vector<GenerateRequest> requests(3);
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].prompt = "In the beginning";
    requests[i].sampling.temperature = 0.8f;
    requests[i].sampling.seed = i;
    requests[i].sampling.max_new_tokens = 24;
  }
  // Ranks that draw other tokens end the engine.
  for (const GenerateResult& result : engine->generate(requests)) {
    EXPECT_EQ(result.tokens.size(), 24u);
  }
}

TEST_P(ParallelGpuModels, SpeculatedTextIsTheReferences) {
  ExactText exact(model());
  const std::vector<ReferencePrompt> prompts = read_reference(model());
  std::vector<GenerateRequest> requests;
  for (const ReferencePrompt& prompt : prompts) requests.push_back(greedy_request(prompt));
  std::vector<std::string> drafters = {"ngram"};
  const std::string drafts = FOVEA_SOURCE_DIR "/testdata/drafts/";
  if (model() == "llama") {
    drafters.push_back("draft:" + drafts + "llama");
    drafters.push_back("eagle:" + drafts + "llama_eagle");
  }
  for (const std::string& drafter : drafters) {
    for (const bool always : {true, false}) {
      SCOPED_TRACE(drafter + (always ? ", always" : ""));
      EngineOptions options = two_gpus(model());
      options.speculate = drafter;
      options.always_speculate = always;
      const auto engine = load_parallel_engine(options, parallel());
      const std::vector<GenerateResult> results = engine->generate(requests);
      for (size_t i = 0; i < prompts.size(); ++i) {
        exact.expect_greedy(prompts[i], results[i].tokens, std::to_string(i));
      }
      EXPECT_GT(engine->stats().drafts, 0);
    }
  }
}

TEST(ParallelGpuEngine, MoreRanksThanGpusAreRefusedByName) {
  FOVEA_NEEDS_GPUS(1);
  EngineOptions options = gpu_options("llama");
  options.device = "cuda:" + std::to_string(gpus() - 1);
  expect_error(ErrorCode::unsupported, "tensor_parallel is 2, but from GPU",
               [&] { (void)load_parallel_engine(options, {.tensor_parallel = 2}); });
}

// A backend whose rank does not come back from a layer in the middle of a pass.
class FailingBackend final : public AttentionBackend {
 public:
  FailingBackend(std::unique_ptr<AttentionBackend> backend, std::atomic<int>& layers,
                 std::function<void()> fail)
      : backend_(std::move(backend)), layers_(layers), fail_(std::move(fail)) {}
  std::string_view name() const override { return backend_->name(); }
  Device device() const override { return backend_->device(); }
  const KvPool* kv() const override { return backend_->kv(); }
  size_t workspace_bytes(const BatchLimits& limits) const override {
    return backend_->workspace_bytes(limits);
  }
  void reserve(const BatchLimits& limits, std::span<std::byte> workspace) override {
    backend_->reserve(limits, workspace);
  }
  void plan(const BatchView& batch, Stream stream) override { backend_->plan(batch, stream); }
  void forward(const LayerTensors& layer, Stream stream) override {
    if (layers_ > 0 && device().index == 1 && --layers_ == 0) fail_();
    backend_->forward(layer, stream);
  }

 private:
  std::unique_ptr<AttentionBackend> backend_;
  std::atomic<int>& layers_;  // counted down once positive
  std::function<void()> fail_;
};

// Starts a prompt over two GPUs; in its second layer rank 1 does `fail`. Returns the error.
std::string error_of_a_prompt(int32_t contexts, const std::function<void()>& fail,
                              std::chrono::milliseconds timeout) {
  BackendRegistry registry;
  std::atomic<int> layers = 0;
  const BackendRegistry builtin = BackendRegistry::builtin();
  for (const BackendEntry& builtin_entry : builtin.entries()) {
    BackendEntry entry = builtin_entry;
    entry.create = [create = builtin_entry.create, &layers, fail](const BackendContext& context) {
      return std::make_unique<FailingBackend>(create(context), layers, fail);
    };
    registry.add(std::move(entry));
  }
  EngineOptions options = two_gpus("llama");
  options.registry = &registry;
  options.cuda_graphs = false;  // replays run no layer on the host
  ParallelOptions parallel{.tensor_parallel = 2, .context_parallel = contexts};
  parallel.communicator.timeout = timeout;
  const auto engine = load_parallel_engine(options, parallel);
  GenerateRequest request;
  request.prompt = "In the beginning God created the heaven and the earth";
  request.sampling.max_new_tokens = 8;
  layers = 2;
  std::string reason;
  try {
    (void)engine->generate({&request, 1});
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::device_failure);
    reason = error.what();
  }
  expect_error(ErrorCode::device_failure, "", [&] { (void)engine->step(); });
  return reason;
}

TEST(ParallelGpuEngine, ARankThatFailsOrHangsInAPassIsAnErrorInTime) {
  FOVEA_NEEDS_GPUS(2);
  using Clock = std::chrono::steady_clock;
  using std::chrono::seconds;
  for (const int32_t contexts : {1, 2}) {
    const Clock::time_point begin = Clock::now();
    const std::string failed = error_of_a_prompt(
        contexts, [] { throw std::runtime_error("injected"); }, seconds(60));
    EXPECT_NE(failed.find("rank 1 failed: injected"), std::string::npos) << failed;
    Clock::time_point hang;
    const std::string hung = error_of_a_prompt(
        contexts,
        [&] {
          hang = Clock::now();
          std::this_thread::sleep_for(seconds(4));
        },
        seconds(2));
    EXPECT_FALSE(hung.empty());
    EXPECT_LT(Clock::now() - hang, seconds(10));
    EXPECT_LT(hang - begin, seconds(60));
  }
}

}  // namespace
}  // namespace fovea
