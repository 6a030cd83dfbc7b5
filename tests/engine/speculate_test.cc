// SPDX-License-Identifier: Apache-2.0
// Steps that verify drafts: their text, log-probabilities and ends are those of steps without,
// while there are fewer of them. The churn tests add preemption, cancellation and cached prefixes.
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/load_engine.h"
#include "engine/small_engine.h"
#include "fovea/engine.h"
#include "support/cases.h"

namespace fovea {
namespace {

// In batch-invariant mode all results are equal bit by bit. With runner_draws, tokens are drawn as
// on a GPU: those after all rows of a chain, before the host sees any.
std::unique_ptr<Engine> engine_with(const std::string& speculate, int32_t max_drafts = 4,
                                    bool runner_draws = false, const std::string& model = "llama",
                                    int32_t branches = 1) {
  EngineOptions options = small_options(model);
  options.draft_branches = branches;
  options.batch_invariant = true;
  options.speculate = speculate;
  options.max_drafts = max_drafts;
  options.always_speculate = !speculate.empty();
  options.record_steps = true;
  return load_engine(options, {}, runner_draws);
}

// A text whose continuation repeats it, so that n-grams guess well.
std::string repeated_prompt() {
  const std::string verse = "And the LORD spake unto Moses, saying, Speak unto the children of ";
  return verse + verse + verse;
}

void expect_equal(const GenerateResult& seen, const GenerateResult& wanted, float tolerance = 0) {
  EXPECT_EQ(seen.tokens, wanted.tokens);
  EXPECT_EQ(seen.text, wanted.text);
  EXPECT_EQ(seen.finish, wanted.finish) << seen.error;
  ASSERT_EQ(seen.logprobs.size(), wanted.logprobs.size());
  for (size_t i = 0; i < seen.logprobs.size(); ++i) {
    EXPECT_NEAR(seen.logprobs[i], wanted.logprobs[i], tolerance);
  }
  ASSERT_EQ(seen.top.size(), wanted.top.size());
  for (size_t i = 0; i < seen.top.size(); ++i) {
    ASSERT_EQ(seen.top[i].size(), wanted.top[i].size());
    for (size_t j = 0; j < seen.top[i].size(); ++j) {
      EXPECT_EQ(seen.top[i][j].token, wanted.top[i][j].token);
      EXPECT_NEAR(seen.top[i][j].logprob, wanted.top[i][j].logprob, tolerance);
    }
  }
}

// Requests whose draws depend on the tokens before them in every way that there is.
std::vector<GenerateRequest> requests_of_all_kinds(std::mt19937& random) {
  std::vector<GenerateRequest> requests;
  for (int i = 0; i < 12; ++i) {
    GenerateRequest& request = requests.emplace_back(text_request(
        i % 3 == 0 ? kPrompt : repeated_prompt(), 20 + static_cast<int32_t>(random() % 60)));
    SamplingParams& sampling = request.sampling;
    sampling.temperature = i % 4 == 0 ? 0.0f : 0.3f * static_cast<float>(i % 4);
    sampling.seed = random();
    sampling.ignore_eos = i % 2 == 0;
    sampling.logprobs = i % 5 == 0 ? 3 : -1;
    sampling.prompt_logprobs = i == 10;
    if (i % 6 == 1) sampling.repetition_penalty = 1.1f;
    if (i % 6 == 2) sampling.frequency_penalty = 0.3f;
    if (i % 6 == 3) sampling.logit_bias = {{5, 3.0f}, {260, -8.0f}};
    if (i % 6 == 4) sampling.json_schema = R"({"type":"array","items":{"enum":["red","red"]}})";
    if (i == 5) sampling.min_tokens = 20;
    if (i == 7) sampling.stop = {" the children"};
    if (i == 8) sampling.stop = {"LORD"};
  }
  return requests;
}

// A model, and its head in testdata.
struct ModelAndHead {
  const char *model, *head;
};
class SpeculateModels : public ::testing::TestWithParam<ModelAndHead> {};
INSTANTIATE_TEST_SUITE_P(Models, SpeculateModels,
                         ::testing::Values(ModelAndHead{"llama", "llama_eagle"},
                                           ModelAndHead{"qwen3_next", "qwen3_next_mtp"}),
                         [](const auto& test) { return std::string(test.param.model); });

TEST_P(SpeculateModels, ResultsOfAllKindsOfRequestsAreThoseWithout) {
  const std::string model = GetParam().model;
  const std::unique_ptr<Engine> plain = engine_with("", 4, false, model);
  const std::string ngram = "ngram",
                    head = std::string("eagle:" FOVEA_SOURCE_DIR "/testdata/drafts/") +
                           GetParam().head;
  for (const auto& [speculate, max_drafts, runner_draws] : {std::tuple(ngram, 1, false),
                                                            {ngram, 3, false},
                                                            {ngram, 9, false},
                                                            {ngram, 3, true},
                                                            {head, 1, false},
                                                            {head, 6, false},
                                                            {head, 3, true}}) {
    SCOPED_TRACE(speculate + ", " + std::to_string(max_drafts) +
                 (runner_draws ? ", drawn by the runner" : ""));
    const std::unique_ptr<Engine> drafting =
        engine_with(speculate, max_drafts, runner_draws, model);
    std::mt19937 random(static_cast<uint32_t>(max_drafts));
    for (int round = 0; round < test::test_scale(); ++round) {
      const std::vector<GenerateRequest> requests = requests_of_all_kinds(random);
      const std::vector<GenerateResult> wanted = plain->generate(requests);
      const std::vector<GenerateResult> seen = drafting->generate(requests);
      for (size_t i = 0; i < requests.size(); ++i) {
        SCOPED_TRACE(i);
        expect_equal(seen[i], wanted[i]);
      }
    }
    const EngineStats& stats = drafting->stats();
    EXPECT_GT(stats.accepted_drafts, 3);
    EXPECT_GT(stats.drafts, stats.accepted_drafts);
    EXPECT_GT(stats.draft_requests, stats.draft_steps);
    expect_no_leak(*drafting);
  }
}

// The runner that draws leaves the last draft of each request on the device until the pass that
// verifies it is enqueued; the other one gives them all before. Their steps are equal.
TEST_P(SpeculateModels, DraftsThatThePassTakesAreThoseThatTheHostWaitsFor) {
  const std::string model = GetParam().model;
  const std::string head =
      std::string("eagle:" FOVEA_SOURCE_DIR "/testdata/drafts/") + GetParam().head;
  for (const int32_t max_drafts : {1, 2, 5}) {
    SCOPED_TRACE(max_drafts);
    std::mt19937 random(3);
    const std::vector<GenerateRequest> requests = requests_of_all_kinds(random);
    const std::unique_ptr<Engine> waits = engine_with(head, max_drafts, false, model),
                                  takes = engine_with(head, max_drafts, true, model);
    const std::vector<GenerateResult> wanted = waits->generate(requests);
    const std::vector<GenerateResult> seen = takes->generate(requests);
    for (size_t i = 0; i < requests.size(); ++i) {
      SCOPED_TRACE(i);
      expect_equal(seen[i], wanted[i]);
    }
    EXPECT_EQ(takes->stats().steps, waits->stats().steps);
    EXPECT_EQ(takes->stats().drafts, waits->stats().drafts);
    EXPECT_EQ(takes->stats().accepted_drafts, waits->stats().accepted_drafts);
    EXPECT_GT(takes->stats().accepted_drafts, 30);
  }
}

// A model and the folder of what drafts trees for it: a head, or a draft model.
class SpeculateTrees : public ::testing::TestWithParam<ModelAndHead> {};
INSTANTIATE_TEST_SUITE_P(Models, SpeculateTrees,
                         ::testing::Values(ModelAndHead{"llama", "eagle:drafts/llama_eagle"},
                                           ModelAndHead{"llama", "draft:drafts/llama"},
                                           ModelAndHead{"gemma2", "draft:models/gpt_oss"},
                                           ModelAndHead{"gpt_oss", "draft:models/gemma2"},
                                           ModelAndHead{"deepseek_v3",
                                                        "eagle:drafts/deepseek_v3_mtp"}),
                         [](const auto& test) {
                           const std::string head = test.param.head;
                           return std::string(test.param.model) + "_" + head.substr(0, 5);
                         });

// The keys of a path are not where those of a chain are, so that sums round in another way. No draw
// of these requests is so close to the edge between two tokens that it matters.
TEST_P(SpeculateTrees, ResultsOfAllKindsOfRequestsAreThoseWithout) {
  const std::string model = GetParam().model, head = GetParam().head;
  const std::unique_ptr<Engine> plain = engine_with("", 4, false, model);
  const std::string speculate = head.substr(0, 6) + FOVEA_SOURCE_DIR "/testdata/" + head.substr(6);
  for (const auto& [max_drafts, branches, runner_draws] :
       {std::tuple(2, 2, false), {7, 3, true}, {12, 8, false}}) {
    SCOPED_TRACE(std::to_string(max_drafts) + " drafts, " + std::to_string(branches) + " branches");
    const std::unique_ptr<Engine> drafting =
        engine_with(speculate, max_drafts, runner_draws, model, branches);
    std::mt19937 random(7 + static_cast<uint32_t>(max_drafts));
    const std::vector<GenerateRequest> requests = requests_of_all_kinds(random);
    const std::vector<GenerateResult> wanted = plain->generate(requests);
    const std::vector<GenerateResult> seen = drafting->generate(requests);
    for (size_t i = 0; i < requests.size(); ++i) {
      SCOPED_TRACE(i);
      expect_equal(seen[i], wanted[i], 2e-4f);
    }
    EXPECT_GT(drafting->stats().accepted_drafts, 30);
    expect_no_leak(*drafting);
  }
}

class SpeculateSteps : public ::testing::TestWithParam<bool> {};  // the runner draws

TEST_P(SpeculateSteps, YieldAllAcceptedTokensAtOnce) {
  const std::unique_ptr<Engine> engine = engine_with("ngram", 4, GetParam());
  GenerateRequest request = text_request(repeated_prompt(), 40);
  const GenerateResult result = engine->generate({&request, 1}).front();
  EXPECT_EQ(result.tokens.size(), 40u) << "max_new_tokens is exact";
  EXPECT_EQ(result.finish, FinishReason::length);
  const EngineStats stats = engine->stats();
  int64_t steps = 0, drafts = 0, accepted = 0;
  for (const StepRecord& record : engine->take_step_records()) {
    steps += record.drafts > 0;
    drafts += record.drafts;
    accepted += record.accepted_drafts;
    EXPECT_LE(record.accepted_drafts, record.drafts);
    EXPECT_EQ(record.draft_requests, record.drafts > 0);
    if (record.decodes > 0) {
      EXPECT_EQ(record.tokens, 1 + record.drafts);
    }
  }
  EXPECT_EQ(stats.draft_steps, steps);
  EXPECT_EQ(stats.drafts, drafts);
  EXPECT_EQ(stats.accepted_drafts, accepted);
  EXPECT_GT(accepted, 2);
  EXPECT_EQ(stats.decode_tokens, 39) << "all but the prompt's";
  EXPECT_EQ(stats.steps, 40 - accepted);
}

// Greedy text that repeats itself makes drafts of which all are accepted: the end of the context
// and the end of the request come in the middle of a chain.
TEST_P(SpeculateSteps, ChainsEndWithTheirRequest) {
  const std::unique_ptr<Engine> plain = engine_with("");
  const std::unique_ptr<Engine> engine = engine_with("ngram", 7, GetParam());
  GenerateRequest request = text_request("", 1000);
  request.tokens.assign(100, 300);
  request.sampling.logit_bias = {{300, 100.0f}};
  const GenerateResult whole = engine->generate({&request, 1}).front();
  EXPECT_EQ(whole.tokens, std::vector<int32_t>(156, 300)) << "the context of 256";
  EXPECT_LT(engine->stats().steps, 30);
  for (const int32_t length : {1, 2, 5, 8, 9, 10}) {
    request.sampling.max_new_tokens = length;
    EXPECT_EQ(engine->generate({&request, 1}).front().tokens.size(), static_cast<size_t>(length));
  }
  request.sampling.max_new_tokens = 60;
  request.sampling.stop = {plain->decode(std::vector<int32_t>(11, 300))};
  expect_equal(engine->generate({&request, 1}).front(), plain->generate({&request, 1}).front());
  expect_no_leak(*engine);
}

INSTANTIATE_TEST_SUITE_P(Draws, SpeculateSteps, ::testing::Bool(), [](const auto& test) {
  return std::string(test.param ? "by_the_runner" : "by_the_engine");
});

TEST(Speculate, CancelledBetweenTheTokensOfAStep) {
  const std::unique_ptr<Engine> engine = engine_with("ngram", 7);
  GenerateRequest request = text_request("", 100);
  request.tokens.assign(100, 300);
  request.sampling.logit_bias = {{300, 100.0f}};
  int tokens = 0;
  const GenerateResult result = engine
                                    ->generate({&request, 1},
                                               [&](const TokenEvent& event) {
                                                 if (++tokens == 4) engine->cancel(event.request);
                                               })
                                    .front();
  EXPECT_EQ(result.finish, FinishReason::cancelled);
  EXPECT_GE(result.tokens.size(), 4u);
  EXPECT_LE(result.tokens.size(), 12u);
  EXPECT_EQ(result.text, engine->decode(result.tokens));
  expect_no_leak(*engine);
}

TEST(Speculate, TextOfMeasuredWidthsIsThatWithout) {
  EngineOptions options = small_options();
  options.batch_invariant = true;
  const std::unique_ptr<Engine> plain = Engine::load(options);
  options.speculate = "ngram";
  const std::unique_ptr<Engine> engine = Engine::load(options);
  std::vector<GenerateRequest> requests;
  for (int i = 0; i < 6; ++i) {
    requests.push_back(text_request(repeated_prompt(), 120));
    requests.back().sampling.temperature = 0.2f * static_cast<float>(i);
    requests.back().sampling.seed = static_cast<uint64_t>(i);
  }
  const std::vector<GenerateResult> wanted = plain->generate(requests);
  const std::vector<GenerateResult> seen = engine->generate(requests);
  for (size_t i = 0; i < requests.size(); ++i) expect_equal(seen[i], wanted[i]);
  EXPECT_GT(engine->stats().drafts, 0);
  EXPECT_LT(engine->stats().draft_steps, engine->stats().steps)
      << "some steps are measured without";
  EXPECT_GT(engine->stats().speculation_gain, 0);
}

// A step of an oracle yields as many tokens as it was asked for, on average.
TEST(Speculate, AnOracleSetsTheTokensOfAStep) {
  for (const bool runner_draws : {false, true}) {
    for (const auto& [length, max_drafts] :
         {std::pair(2.7, 3), std::pair(1.0, 2), std::pair(3.0, 2)}) {
      EngineOptions options = small_options();
      options.random_weights = 1;
      options.speculate = "oracle:" + std::to_string(length);
      options.max_drafts = max_drafts;
      options.always_speculate = true;
      const std::unique_ptr<Engine> engine = load_engine(options, {}, runner_draws);
      std::vector<GenerateRequest> requests(8, text_request(kPrompt, 200));
      for (const GenerateResult& result : engine->generate(requests))
        EXPECT_EQ(result.tokens.size(), 200u);
      const EngineStats& stats = engine->stats();
      const double seen = 1 + static_cast<double>(stats.accepted_drafts) /
                                  static_cast<double>(stats.draft_requests);
      EXPECT_NEAR(seen, length, length > 1 && length < 1 + max_drafts ? 0.15 : 0.01);
      expect_no_leak(*engine);
    }
  }
}

}  // namespace
}  // namespace fovea
