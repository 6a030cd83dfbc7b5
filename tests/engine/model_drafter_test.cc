// SPDX-License-Identifier: Apache-2.0
// Drafts of a second model: text is that without, and guesses are as good as the model.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "engine/load_engine.h"
#include "engine/small_engine.h"
#include "fovea/engine.h"
#include "fovea/parallel_engine.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

const std::string kTrained = "trained";

EngineOptions drafting_options(const std::string& model, const std::string& draft) {
  EngineOptions options = small_options(model);
  options.batch_invariant = true;
  if (draft.empty()) return options;
  options.speculate = "draft:" + (draft == kTrained ? FOVEA_SOURCE_DIR "/testdata/drafts/llama"
                                                    : model_folder(draft));
  options.always_speculate = true;
  return options;
}

std::vector<GenerateRequest> sampled_requests() {
  std::vector<GenerateRequest> requests;
  for (int i = 0; i < 6; ++i) {
    GenerateRequest& request = requests.emplace_back(text_request(kPrompt, 30 + 5 * i));
    request.sampling.temperature = 0.4f * static_cast<float>(i);
    request.sampling.seed = static_cast<uint64_t>(i);
    if (i == 4) request.sampling.top_k = 20;
    if (i == 5) request.sampling.top_p = 0.8f;
  }
  return requests;
}

void expect_equal_texts(Engine& seen, Engine& wanted,
                        const std::vector<GenerateRequest>& requests) {
  const std::vector<GenerateResult> a = seen.generate(requests), b = wanted.generate(requests);
  for (size_t i = 0; i < requests.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(a[i].tokens, b[i].tokens);
    EXPECT_EQ(a[i].text, b[i].text);
    EXPECT_EQ(a[i].finish, b[i].finish) << a[i].error;
  }
}

// A model that drafts for itself is always right, because a draw depends on seed, position and
// logits only. So its steps give as many tokens as they can.
TEST(ModelDrafter, AModelAgreesWithItself) {
  for (const std::string model : {"llama", "gpt_oss", "deepseek_v3"}) {
    const std::unique_ptr<Engine> plain = Engine::load(drafting_options(model, ""));
    for (const bool runner_draws : {false, true}) {
      SCOPED_TRACE(model + (runner_draws ? ", drawn by the runner" : ""));
      const std::unique_ptr<Engine> engine =
          load_engine(drafting_options(model, model), {}, runner_draws);
      const int64_t plain_steps = plain->stats().steps;
      expect_equal_texts(*engine, *plain, sampled_requests());
      EXPECT_GT(engine->stats().drafts, 100);
      EXPECT_EQ(engine->stats().accepted_drafts, engine->stats().drafts);
      EXPECT_LT(engine->stats().steps, (plain->stats().steps - plain_steps) / 3);
      expect_no_leak(*engine);
      expect_no_leak(*plain);
    }
  }
}

// testdata/drafts/llama has one layer of half the width. Three of its four drafts are right on
// average.
TEST(ModelDrafter, ATrainedDraftModelYieldsMoreThanTwoTokensAStep) {
  const std::unique_ptr<Engine> plain = Engine::load(drafting_options("llama", ""));
  const std::unique_ptr<Engine> engine = Engine::load(drafting_options("llama", kTrained));
  std::vector<GenerateRequest> requests;
  for (const ReferencePrompt& prompt : read_reference("llama"))
    if (prompt.tokens.size() < 200) requests.push_back(greedy_request(prompt));
  expect_equal_texts(*engine, *plain, requests);
  const EngineStats& stats = engine->stats();
  EXPECT_GT(stats.accepted_drafts, stats.draft_requests) << "drafts per request and step";
  EXPECT_LT(stats.steps, plain->stats().steps / 2);
}

// All of testdata's models have one vocabulary and have learnt one text. Drafts of gemma2 and
// gpt_oss come from window pools.
TEST(ModelDrafter, AnotherModelIsOftenRight) {
  for (const auto& [model, draft] : std::vector<std::pair<std::string, std::string>>{
           {"llama", "gemma2"}, {"gemma2", "gpt_oss"}, {"gpt_oss", "llama"}}) {
    SCOPED_TRACE(model + " with " + draft);
    const std::unique_ptr<Engine> plain = Engine::load(drafting_options(model, ""));
    // On a GPU, passes of the draft model begin before the drafts before them are known.
    const std::unique_ptr<Engine> engine = load_engine(drafting_options(model, draft), {}, true);
    std::vector<GenerateRequest> requests = sampled_requests();
    // Longer than the windows of 128 and than a step.
    for (const ReferencePrompt& prompt : read_reference(model)) {
      if (prompt.tokens.size() > 150) continue;
      requests.push_back(greedy_request(prompt));
      requests.back().sampling.temperature = 0.5f;
    }
    expect_equal_texts(*engine, *plain, requests);
    const EngineStats& stats = engine->stats();
    EXPECT_GT(stats.accepted_drafts, stats.drafts / 10);
    EXPECT_LT(stats.accepted_drafts, stats.drafts);
    EXPECT_GT(stats.memory.drafter, 0u);
    expect_no_leak(*engine);
  }
}

// The second request has the first one's prompt cached in both models.
TEST(ModelDrafter, PromptsAreCachedInTheDraftModelToo) {
  EngineOptions options = drafting_options("llama", "llama");
  options.kv_memory_bytes = size_t{3} << 20;
  const std::unique_ptr<Engine> engine = Engine::load(options);
  GenerateRequest request = text_request(kPrompt + " " + kPrompt + " " + kPrompt, 20);
  const GenerateResult first = engine->generate({&request, 1}).front();
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(engine->generate({&request, 1}).front().tokens, first.tokens);
    request.salt = std::to_string(i / 2);
    if (i % 7 == 6) engine->clear_prefix_cache();
  }
  EXPECT_GT(engine->stats().prefix_hits, 0);
  EXPECT_EQ(engine->stats().accepted_drafts, engine->stats().drafts);
}

// Ranks of one model make the same drafts, because they draw the same tokens and agree on the times
// that they measure.
TEST(ModelDrafter, RanksDraftAlike) {
  EngineOptions options = drafting_options("llama", "llama");
  const std::vector<GenerateRequest> requests = sampled_requests();
  const std::unique_ptr<Engine> plain = Engine::load(drafting_options("llama", ""));
  for (const bool always : {true, false}) {
    options.always_speculate = always;
    const std::unique_ptr<Engine> ranks = load_parallel_engine(options, {.tensor_parallel = 2});
    expect_equal_texts(*ranks, *plain, requests);
    if (!always) continue;  // measured widths may leave out drafts
    EXPECT_GT(ranks->stats().accepted_drafts, ranks->stats().drafts / 2);
  }
}

TEST(ModelDrafter, PlanCountsItsMemory) {
  EngineOptions options = drafting_options("llama", "qwen3");
  const EngineMemory planned = Engine::plan(options).memory;
  const std::unique_ptr<Engine> engine = Engine::load(options);
  EXPECT_EQ(planned.drafter, engine->stats().memory.drafter);
  EXPECT_EQ(planned.total(), engine->stats().memory.total());
  EXPECT_NE(planned.explain().find("draft model"), std::string::npos);
  EXPECT_LE(planned.caches, options.kv_memory_bytes * 9 / 10) << "the draft model has its part";
}

// On a GPU the rows of logits and the arrays of a pass grow with the drafts.
TEST(ModelDrafter, GpusHaveRoomForDrafts) {
  const DeviceInfo gpu{.kind = DeviceKind::cuda, .name = "sm_90", .sm = 90, .cores = 132};
  EngineOptions options = drafting_options("llama", "");
  options.kv_dtype = DType::bf16;
  options.max_requests = 64;  // with more tokens than small chunks of prompts, which have room
  options.max_batch_tokens = 4096;  // more than the rows of logits
  const EnginePlan plain = Engine::plan(options, gpu);
  options.speculate = "ngram";
  options.max_drafts = 3;
  const EnginePlan ngram = Engine::plan(options, gpu);
  EXPECT_EQ(ngram.memory.logits - plain.memory.logits, size_t{64 * 4} * 2048 * sizeof(float));
  EXPECT_GT(ngram.memory.batch, plain.memory.batch);
  options.speculate = drafting_options("llama", kTrained).speculate;
  EXPECT_GT(Engine::plan(options, gpu).memory.drafter, 0u);
}

TEST(ModelDrafter, RefusesModelsByName) {
  test::expect_error(ErrorCode::unsupported, "the draft model Qwen3NextForCausalLM has recurrent",
                     [] { (void)Engine::load(drafting_options("llama", "qwen3_next")); });
  EngineOptions options = drafting_options("llama", "");
  options.speculate = "draft:/nowhere";
  test::expect_error(ErrorCode::io, "/nowhere", [&] { (void)Engine::load(options); });
  options.speculate = "draft:";
  test::expect_invalid(
      "speculate is 'draft:', must be ngram, draft:MODEL, eagle:HEAD, oracle:LENGTH or empty",
      [&] { (void)Engine::load(options); });
  options.random_weights = 1;
  options.speculate = std::string("draft:" FOVEA_SOURCE_DIR "/testdata/shapes/qwen3_0.6b.json");
  test::expect_invalid("the draft model has a vocabulary of 151936 tokens, the model of 2048",
                       [&] { (void)Engine::plan(options); });
}

}  // namespace
}  // namespace fovea
