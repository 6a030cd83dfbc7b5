// SPDX-License-Identifier: Apache-2.0
// An engine whose process runs out of memory at any allocation: the step throws or a request fails,
// no other request loses or repeats a token, nothing leaks, and the engine continues to serve.
#include <gtest/gtest.h>

#include <memory>
#include <new>
#include <string>
#include <vector>

#include "engine/load_engine.h"
#include "engine/small_engine.h"
#include "fovea/error.h"
#include "support/count_allocations.h"

namespace fovea {
namespace {

class ExhaustedMemory : public ::testing::TestWithParam<std::string> {};

std::vector<GenerateRequest> requests_of(const std::string& model) {
  const std::vector<ReferencePrompt> prompts = read_reference(model);
  std::vector<GenerateRequest> requests;
  for (const size_t i : {0, 1, 1}) {
    GenerateRequest request = greedy_request(prompts[i]);
    request.sampling.max_new_tokens = 4 + static_cast<int32_t>(requests.size());
    requests.push_back(request);
  }
  requests[0].sampling.stop = {"no such text"};
  requests[1].sampling.logprobs = 2;
  return requests;
}

// Runs the requests again and again, and lets a later allocation fail each time.
void expect_no_token_lost(const EngineOptions& options,
                          const std::vector<GenerateRequest>& requests, bool runner_draws = false) {
  std::unique_ptr<Engine> engine = load_engine(options, {}, runner_draws);
  std::vector<std::vector<int32_t>> want;
  for (const GenerateResult& result : engine->generate(requests)) want.push_back(result.tokens);
  int failures = 0;
  for (int64_t before = 0;; before += 1 + before / 16) {
    SCOPED_TRACE(before);
    if (requests[0].sampling.json_schema.empty()) {
      engine->clear_prefix_cache();
    } else {
      engine = Engine::load(options);  // without the masks that it kept
    }
    std::vector<int64_t> ids;
    for (const GenerateRequest& request : requests) ids.push_back(engine->add(request));
    std::vector<FinishReason> finish(ids.size());
    std::vector<std::vector<int32_t>> tokens(ids.size());
    for (std::vector<int32_t>& list : tokens) list.reserve(16);
    bool failed = false;
    test::allocations_before_failure = before;
    while (!engine->idle()) {
      try {
        for (const TokenEvent& event : engine->step()) {
          const auto i = static_cast<size_t>(event.request - ids.front());
          if (event.token >= 0) tokens[i].push_back(event.token);
          finish[i] = event.finish;
          if (event.finish != FinishReason::failed) continue;
          EXPECT_NE(event.error.find("memory"), std::string::npos) << event.error;
          failed = true;
        }
      } catch (const std::bad_alloc&) {
        failed = true;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::out_of_memory) << error.what();
        failed = true;
      }
    }
    const bool reached = test::allocations_before_failure.exchange(-1) < 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      if (finish[i] == FinishReason::failed) continue;
      EXPECT_EQ(finish[i], FinishReason::length);
      EXPECT_EQ(tokens[i], want[i]) << "request " << i;
    }
    expect_no_leak(*engine);
    if (!reached) break;
    failures += failed;
  }
  EXPECT_GT(failures, 10);
}

TEST_P(ExhaustedMemory, AStepThatFailsCostsNoToken) {
  expect_no_token_lost(small_options(GetParam()), requests_of(GetParam()));
}

// The masks of a pass are made after it was enqueued, and after the events of the pass before.
TEST(ExhaustedMemoryOfSchemas, AStepThatFailsCostsNoToken) {
  std::vector<GenerateRequest> requests = requests_of("llama");
  requests[1].sampling.logprobs = -1;
  for (GenerateRequest& request : requests) {
    request.sampling.ignore_eos = true;
    request.sampling.json_schema =
        R"({"type":"array","items":{"enum":["red","green",[1,2]]},"minItems":9})";
  }
  for (const bool overlap : {false, true}) {
    SCOPED_TRACE(overlap);
    EngineOptions options = small_options("llama");
    options.overlap = overlap;
    expect_no_token_lost(options, requests);
  }
}

// A pass is enqueued while a pass of its drafter is in flight, and either may fail.
TEST(ExhaustedMemoryOfDrafts, AStepThatFailsCostsNoToken) {
  EngineOptions options = small_options("llama");
  options.speculate = "eagle:" FOVEA_SOURCE_DIR "/testdata/drafts/llama_eagle";
  options.always_speculate = true;
  options.batch_invariant = true;
  std::vector<GenerateRequest> requests = requests_of("llama");
  for (GenerateRequest& request : requests) request.sampling.max_new_tokens += 3;
  expect_no_token_lost(options, requests, true);
}

// Everything built so far is freed: AddressSanitizer would report a leak.
TEST_P(ExhaustedMemory, LoadingReportsIt) {
  const EngineOptions options = small_options(GetParam());
  for (const bool lasts : {false, true}) {
    int failures = 0;
    for (int64_t before = 0;; before += 1 + before / 8) {
      ErrorCode code = ErrorCode::out_of_memory;
      bool failed = true;
      test::failure_lasts = lasts;
      test::allocations_before_failure = before;
      try {
        (void)Engine::load(options);
        failed = test::allocations_before_failure <= 0;  // else the run ended before it
      } catch (const std::bad_alloc&) {
      } catch (const Error& error) {
        code = error.code();
      }
      test::allocations_before_failure = -1;
      test::failure_lasts = false;
      EXPECT_EQ(code, ErrorCode::out_of_memory);
      if (!failed) break;
      ++failures;
    }
    EXPECT_GT(failures, 40) << lasts;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ExhaustedMemory,
                         ::testing::Values("llama", "gemma2", "qwen3_next"),
                         [](const auto& model) { return model.param; });

}  // namespace
}  // namespace fovea
