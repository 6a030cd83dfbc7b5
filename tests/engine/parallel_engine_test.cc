// SPDX-License-Identifier: Apache-2.0
// An engine whose model is distributed over ranks gives the text of one rank, for every
// architecture; ranks that fail or hang end it with a reason.
#include "fovea/parallel_engine.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "engine/reference_text.h"
#include "engine/small_engine.h"
#include "fovea/engine_service.h"
#include "fovea/error.h"
#include "support/expect_error.h"
#include "support/golden_model.h"

namespace fovea {
namespace {

using std::chrono::milliseconds;
using test::expect_error;
using test::expect_invalid;

EngineOptions options_for(const std::string& folder) {
  EngineOptions options;
  options.model_path = folder;
  options.kv_memory_bytes = size_t{64} << 20;
  options.max_context = 1024;
  options.max_requests = 8;
  options.max_batch_tokens = 256;
  options.threads = 2;
  return options;
}

// Besides heads and columns, ranks divide nothing, or contexts, or experts by experts.
enum class Division { heads, contexts, experts };

// Model, ranks, and how they divide the model.
class TextOfRanks : public testing::TestWithParam<std::tuple<const char*, int, Division>> {
 protected:
  std::string model() const { return std::get<0>(GetParam()); }
  std::unique_ptr<Engine> load(EngineOptions options) const {
    const auto& [name, ranks, division] = GetParam();
    return load_parallel_engine(options,
                                {.tensor_parallel = ranks,
                                 .context_parallel = division == Division::contexts ? ranks : 1,
                                 .expert_parallel = division == Division::experts});
  }
};

// Batched, with chunked prompts and reused prefixes.
TEST_P(TextOfRanks, IsTheReferences) {
  const std::unique_ptr<Engine> engine = load(options_for(model_folder(model())));
  const std::vector<ReferencePrompt> all = read_reference(model());
  std::vector<GenerateRequest> requests;
  for (const ReferencePrompt& prompt : all) requests.push_back(greedy_request(prompt));
  for (const bool warm : {false, true}) {
    const std::vector<GenerateResult> results = engine->generate(requests);
    for (size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(results[i].tokens, all[i].greedy) << i << (warm ? " warm" : " cold");
    }
  }
  EXPECT_GT(engine->stats().prefix_hits, 0);
  expect_no_leak(*engine);
}

INSTANTIATE_TEST_SUITE_P(TwoRanks, TextOfRanks,
                         testing::Combine(testing::ValuesIn(kTestModels), testing::Values(2),
                                          testing::Values(Division::heads, Division::contexts)));
// The other models have two heads.
INSTANTIATE_TEST_SUITE_P(
    FourRanks, TextOfRanks,
    testing::Combine(testing::Values("llama", "qwen3", "gpt_oss", "llama4_text"),
                     testing::Values(4), testing::Values(Division::heads, Division::contexts)));
INSTANTIATE_TEST_SUITE_P(Experts, TextOfRanks,
                         testing::Combine(testing::Values("gpt_oss", "llama4_text", "qwen3_next",
                                                          "deepseek_v3"),
                                          testing::Values(2), testing::Values(Division::experts)));
INSTANTIATE_TEST_SUITE_P(FourRanksWithExperts, TextOfRanks,
                         testing::Combine(testing::Values("gpt_oss"), testing::Values(4),
                                          testing::Values(Division::experts)));

// A rank caches its own tokens only: with one kv head, which heads alone would copy to all ranks,
// the same memory holds twice the tokens.
TEST(ParallelEngine, DistributedContextsTakeLessMemory) {
  EngineOptions options = options_for(model_folder("qwen3"));
  options.kv_memory_bytes = size_t{8} << 20;
  options.max_context = 256;
  const auto tokens = [&](int32_t contexts) {
    const auto engine =
        load_parallel_engine(options, {.tensor_parallel = 2, .context_parallel = contexts});
    return engine->stats().kv_pages * options.page_size * contexts;
  };
  EXPECT_NEAR(static_cast<double>(tokens(2)) / static_cast<double>(tokens(1)), 2, 0.1);
}

// Sampling is by the same seed on all ranks, and tokens drawn ahead are theirs, too.
TEST(ParallelEngine, SampledTextIsThatOfOneRank) {
  EngineOptions options = options_for(model_folder("llama"));
  options.overlap = true;
  const std::unique_ptr<Engine> whole = Engine::load(options);
  const std::unique_ptr<Engine> divided = load_parallel_engine(options, {.tensor_parallel = 2});
  std::vector<GenerateRequest> requests(3);
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].prompt = "In the beginning";
    requests[i].sampling.temperature = 0.8f;
    requests[i].sampling.seed = i;
    requests[i].sampling.max_new_tokens = 24;
  }
  const auto expected = whole->generate(requests), got = divided->generate(requests);
  for (size_t i = 0; i < requests.size(); ++i) EXPECT_EQ(got[i].text, expected[i].text);
}

// Ranks that measure their steps agree on the times, so that all make the same drafts.
TEST(ParallelEngine, SpeculatedTextIsTheReferences) {
  const std::vector<ReferencePrompt> all = read_reference("llama");
  std::vector<GenerateRequest> requests;
  for (const ReferencePrompt& prompt : all) requests.push_back(greedy_request(prompt));
  for (const bool always : {true, false}) {
    for (const int32_t contexts : {1, 2}) {
      SCOPED_TRACE(testing::Message() << "always " << always << ", contexts " << contexts);
      EngineOptions options = options_for(model_folder("llama"));
      options.speculate = "ngram";
      options.always_speculate = always;
      const auto engine =
          load_parallel_engine(options, {.tensor_parallel = 2, .context_parallel = contexts});
      const std::vector<GenerateResult> results = engine->generate(requests);
      for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(results[i].tokens, all[i].greedy) << i;
      EXPECT_GT(engine->stats().accepted_drafts, 0);
    }
  }
}

// Architectures without a checkpoint in testdata, by the logits of a short text.
TEST(ParallelEngine, LogitsOfEveryArchitectureAreThoseOfOneRank) {
  const std::vector<int32_t> tokens = {5, 9, 2, 17, 30, 4, 8, 11, 3};
  int divided = 0;
  for (const std::string& name : golden_models()) {
    EngineOptions options = options_for(golden_folder(name));
    options.max_context = 64;
    const std::vector<float> expected = Engine::load(options)->logits(tokens);
    std::vector<int> numbers = {2};
    if (name == "olmo2") numbers.push_back(4);            // ranks that share kv heads
    if (name.starts_with("mamba")) numbers.push_back(4);  // heads do not limit their number
    if (name == "mamba") numbers.push_back(3);
    for (const int ranks : numbers) {
      for (const int contexts : {1, ranks}) {
        SCOPED_TRACE(fmt::format("{}, {} ranks, {} of a context", name, ranks, contexts));
        const std::vector<float> got =
            load_parallel_engine(options, {.tensor_parallel = ranks, .context_parallel = contexts})
                ->logits(tokens);
        ASSERT_EQ(got.size(), expected.size());
        for (size_t i = 0; i < got.size(); ++i) {
          ASSERT_NEAR(got[i], expected[i], 1e-4 * std::max(1.0f, std::fabs(expected[i])))
              << "logit " << i;
        }
      }
    }
    ++divided;
  }
  EXPECT_EQ(divided, static_cast<int>(golden_models().size()));
}

TEST(ParallelEngine, NamesTheLinearHeadsThatCannotBeDivided) {
  for (const auto& [name, heads] : {std::pair("mamba", 192), {"lfm2", 128}}) {
    EngineOptions options = options_for(golden_folder(name));
    options.threads = 5;
    expect_invalid(
        "ranks is 5, must divide the " + std::to_string(heads) + " value heads of linear layers",
        [&] { load_parallel_engine(options, {.tensor_parallel = 5}); });
  }
}

// A GPU holds a rank's own part of each matrix: the parts of all ranks together are the whole, but
// for what all of them have.
TEST(ParallelEngine, RanksOfAGpuHoldTheirPartsOfTheWeights) {
  const DeviceInfo gpu{.kind = DeviceKind::cuda, .name = "sm_90", .sm = 90, .cores = 132};
  int divided = 0;
  for (const std::string& name : golden_models()) {
    EngineOptions options = options_for(golden_folder(name));
    options.random_weights = 1;
    options.kv_dtype = DType::bf16;
    options.max_context = 64;
    EnginePlan whole, rank;
    try {
      whole = Engine::plan(options, gpu);
      rank = plan_parallel_engine(options, {.tensor_parallel = 2}, gpu);
    } catch (const Error& error) {  // fp32 weights, or matrices too narrow for a GPU
      EXPECT_EQ(error.code(), ErrorCode::unsupported) << name << ": " << error.what();
      continue;
    }
    EXPECT_LE(rank.memory.weights, whole.memory.weights) << name;
    EXPECT_GE(2 * rank.memory.weights, whole.memory.weights) << name;
    ++divided;
  }
  EXPECT_GE(divided, 5);
}

GenerateRequest short_request() {
  GenerateRequest request;
  request.prompt = "And it came to pass";
  request.sampling.max_new_tokens = 20;
  return request;
}

TEST(ParallelEngine, ARankThatFailsEndsTheEngineWithTheReason) {
  ParallelOptions parallel{.tensor_parallel = 2};
  parallel.communicator.arrive = [](int rank, int64_t call) {
    if (rank == 1 && call == 40) throw std::runtime_error("injected");
  };
  const auto engine = load_parallel_engine(options_for(model_folder("llama")), parallel);
  const GenerateRequest request = short_request();
  expect_error(ErrorCode::device_failure, "rank 1 failed: injected", [&] {
    (void)engine->generate({&request, 1});
  });
  expect_error(ErrorCode::device_failure, "injected", [&] { (void)engine->step(); });
  expect_error(ErrorCode::device_failure, "injected", [&] { (void)engine->add(request); });
}

TEST(ParallelEngine, ARankThatHangsEndsTheEngineAfterTheTimeout) {
  ParallelOptions parallel{.tensor_parallel = 2};
  parallel.communicator.timeout = milliseconds(300);
  parallel.communicator.arrive = [](int rank, int64_t call) {
    if (rank == 1 && call == 40) std::this_thread::sleep_for(milliseconds(1500));
  };
  const auto engine = load_parallel_engine(options_for(model_folder("llama")), parallel);
  const GenerateRequest request = short_request();
  expect_error(ErrorCode::device_failure, "rank 1 did not come within 300 ms", [&] {
    (void)engine->generate({&request, 1});
  });
}

TEST(ParallelEngine, AServiceAnswersAllRequestsOfAnEngineThatHasFailed) {
  ParallelOptions parallel{.tensor_parallel = 2};
  parallel.communicator.arrive = [](int rank, int64_t call) {
    if (rank == 1 && call == 40) throw std::runtime_error("injected");
  };
  std::atomic<int> failed = 0;
  std::vector<ServiceRequest> requests;
  for (int i = 0; i < 3; ++i) {
    requests.push_back({.request = short_request(), .on_event = [&](const TokenEvent& event) {
                          failed += event.finish == FinishReason::failed;
                        }});
  }
  EngineService service(load_parallel_engine(options_for(model_folder("llama")), parallel), {});
  service.add(std::move(requests));
  EXPECT_TRUE(service.wait_idle(std::chrono::seconds(20)));
  EXPECT_EQ(failed, 3);
}

TEST(ParallelEngine, CancelledRequestsLeaveAllRanks) {
  const auto engine =
      load_parallel_engine(options_for(model_folder("llama")), {.tensor_parallel = 2});
  const int64_t id = engine->add(short_request());
  (void)engine->step();
  engine->cancel(id);
  const std::vector<TokenEvent> events = engine->step();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].finish, FinishReason::cancelled);
  EXPECT_TRUE(engine->idle());
  const GenerateRequest request = short_request();
  EXPECT_EQ(engine->generate({&request, 1}).front().tokens.size(), 20u);
  expect_no_leak(*engine);
}

TEST(ParallelEngine, NamesTheArgument) {
  const EngineOptions options = options_for(model_folder("llama"));
  const auto load = [&](int32_t ranks) {
    (void)load_parallel_engine(options, {.tensor_parallel = ranks});
  };
  expect_invalid("tensor_parallel is 0, must be in [1, 64]", [&] { load(0); });
  expect_invalid("tensor_parallel is 65", [&] { load(65); });
  expect_invalid("context_parallel is 4, must be 1 or as tensor_parallel, 2", [&] {
    (void)load_parallel_engine(options, {.tensor_parallel = 2, .context_parallel = 4});
  });
  expect_invalid("ranks is 3, 4 q heads and 2 kv heads can be divided among 1, 2, 4",
                 [&] { load(3); });
  const auto engine = load_parallel_engine(options, {.tensor_parallel = 2});
  EXPECT_NE(engine->explain().find("tensor parallelism over 2 ranks"), std::string::npos);
  GenerateRequest bad = short_request();
  bad.sampling.temperature = -1;
  expect_invalid("temperature", [&] { (void)engine->add(bad); });
  EXPECT_EQ(engine->add(short_request()), 1);
}

}  // namespace
}  // namespace fovea
