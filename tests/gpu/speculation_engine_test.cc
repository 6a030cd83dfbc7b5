// SPDX-License-Identifier: Apache-2.0
// Steps of the engine that verify drafts on a GPU. In batch-invariant mode every token, bit and end
// is that without drafts: in graphs and without, with drafts by n-grams and by a model, sampled,
// preempted, cancelled and after prefix hits. Skipped without a GPU.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/reference_text.h"
#include "engine/tight_engine.h"
#include "fovea/engine.h"
#include "fovea/error.h"
#include "fovea/gpu.h"
#include "gpu/exact_text.h"

namespace fovea {
namespace {

EngineOptions options_for(const std::string& model) {
  EngineOptions options;
  options.model_path = model_folder(model);
  options.device = "cuda";
  options.kv_dtype = DType::bf16;
  options.kv_memory_bytes = size_t{64} << 20;
  options.max_context = 1024;
  options.max_requests = 8;
  options.max_batch_tokens = 200;
  options.batch_invariant = true;
  options.threads = 2;
  return options;
}

EngineOptions drafting(EngineOptions options, const std::string& speculate, int32_t max_drafts) {
  options.speculate = speculate;
  options.max_drafts = max_drafts;
  options.always_speculate = true;
  return options;
}

const std::string kTrained = "draft:" FOVEA_SOURCE_DIR "/testdata/drafts/llama";

// Returns the option for the head that was trained for the model.
std::string head_of(const std::string& model) {
  return "eagle:" FOVEA_SOURCE_DIR "/testdata/drafts/" + model +
         (model == "llama" ? "_eagle" : "_mtp");
}

// Texts that repeat themselves, so that n-grams guess well, with draws of every kind.
std::vector<GenerateRequest> requests_of_all_kinds(const std::string& model) {
  std::vector<GenerateRequest> requests;
  const std::vector<ReferencePrompt> prompts = read_reference(model);
  for (int i = 0; i < 16; ++i) {
    GenerateRequest& request = requests.emplace_back(greedy_request(prompts[i % 4]));
    const std::vector<int32_t> once = request.tokens;
    if (once.size() < 200) request.tokens.insert(request.tokens.end(), once.begin(), once.end());
    SamplingParams& sampling = request.sampling;
    sampling.max_new_tokens = 20 + 7 * (i % 6);
    sampling.temperature = i % 3 == 0 ? 0.0f : 0.4f * static_cast<float>(i % 3);
    sampling.seed = static_cast<uint64_t>(i);
    if (i == 4) sampling.top_k = 20;
    if (i == 5) sampling.top_p = 0.9f;
    if (i == 7) sampling.logprobs = 3;  // its tokens are drawn by the host
    if (i == 8) sampling.repetition_penalty = 1.1f;
    if (i == 10) sampling.stop_tokens = {5, 40, 80, 260};
    if (i == 11) sampling.prompt_logprobs = true;
    if (i == 12) sampling.json_schema = R"({"type":"array","items":{"enum":["red","red"]}})";
  }
  return requests;
}

void expect_equal(const GenerateResult& seen, const GenerateResult& wanted) {
  EXPECT_EQ(seen.tokens, wanted.tokens);
  EXPECT_EQ(seen.text, wanted.text);
  EXPECT_EQ(seen.finish, wanted.finish) << seen.error;
  EXPECT_EQ(seen.logprobs, wanted.logprobs);
  EXPECT_EQ(seen.prompt_logprobs, wanted.prompt_logprobs);
}

void expect_no_leak(Engine& engine) {
  EXPECT_TRUE(engine.idle());
  engine.clear_prefix_cache();
  EXPECT_EQ(engine.stats().kv_pages_free, engine.stats().kv_pages);
}

class GpuSpeculation : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!why_no_gpu().empty()) GTEST_SKIP() << why_no_gpu();
  }
  std::string model() const { return GetParam(); }

  void expect_texts(const EngineOptions& options, const std::vector<GenerateRequest>& requests,
                    const std::vector<GenerateResult>& wanted) {
    const std::unique_ptr<Engine> engine = Engine::load(options);
    const std::vector<GenerateResult> seen = engine->generate(requests);
    for (size_t i = 0; i < requests.size(); ++i) {
      SCOPED_TRACE(i);
      expect_equal(seen[i], wanted[i]);
    }
    EXPECT_GT(engine->stats().accepted_drafts, 3);
    EXPECT_GT(engine->stats().drafts, engine->stats().accepted_drafts);
    expect_no_leak(*engine);
  }

  void expect_churn(const std::string& speculate);
};

TEST_P(GpuSpeculation, TextIsThatWithout) {
  const std::vector<GenerateRequest> requests = requests_of_all_kinds(model());
  const std::vector<GenerateResult> wanted = Engine::load(options_for(model()))->generate(requests);
  for (const bool graphs : {true, false}) {
    EngineOptions options = drafting(options_for(model()), "ngram", 4);
    options.cuda_graphs = graphs;
    SCOPED_TRACE(graphs ? "replayed" : "enqueued");
    expect_texts(options, requests, wanted);
  }
  EngineOptions options = drafting(options_for(model()), "ngram", 9);
  options.max_graph_requests = 3;  // larger steps are enqueued
  options.page_size = 3;
  expect_texts(options, requests, wanted);
}

// The draft model draws with the request's own rules, so its guesses are as good as it is.
TEST_P(GpuSpeculation, TextIsThatWithoutADraftModel) {
  const std::vector<GenerateRequest> requests = requests_of_all_kinds(model());
  const std::vector<GenerateResult> wanted = Engine::load(options_for(model()))->generate(requests);
  expect_texts(drafting(options_for(model()), kTrained, 3), requests, wanted);
}

TEST_P(GpuSpeculation, AModelAgreesWithItself) {
  if (churn::has_states(model())) GTEST_SKIP() << "draft models have no recurrent states";
  const std::vector<GenerateRequest> requests = requests_of_all_kinds(model());
  const std::unique_ptr<Engine> plain = Engine::load(options_for(model()));
  const std::vector<GenerateResult> wanted = plain->generate(requests);
  const std::unique_ptr<Engine> engine =
      Engine::load(drafting(options_for(model()), "draft:" + model_folder(model()), 4));
  const std::vector<GenerateResult> seen = engine->generate(requests);
  for (size_t i = 0; i < requests.size(); ++i) {
    SCOPED_TRACE(i);
    expect_equal(seen[i], wanted[i]);
  }
  const EngineStats& stats = engine->stats();
  EXPECT_GT(stats.accepted_drafts, stats.drafts * 4 / 5) << "penalties alone are not drafted for";
  EXPECT_LT(stats.steps, plain->stats().steps / 2);
  expect_no_leak(*engine);
}

// Without batch-invariant mode kernels depend on the width of a step, but graphs change no bit.
TEST_P(GpuSpeculation, ReplayedAndEnqueuedStepsAreBitwiseEqual) {
  std::vector<GenerateRequest> requests = requests_of_all_kinds(model());
  for (GenerateRequest& request : requests) request.sampling.logprobs = 0;
  std::vector<std::vector<GenerateResult>> results;
  for (const bool graphs : {true, false}) {
    EngineOptions options = drafting(options_for(model()), "ngram", 3);
    options.batch_invariant = false;
    options.cuda_graphs = graphs;
    const std::unique_ptr<Engine> engine = Engine::load(options);
    results.push_back(engine->generate(requests));
    EXPECT_GT(engine->stats().accepted_drafts, 0);
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    SCOPED_TRACE(i);
    expect_equal(results[0][i], results[1][i]);
  }
}

// Returns options whose pools have `factor` times the bytes of the longest request.
EngineOptions tight(EngineOptions options, double factor) {
  options.page_size = churn::kPageSize;
  options.max_context = churn::kContext;
  options.max_requests = 4;
  options.max_batch_tokens = 48;
  size_t low = size_t{16} << 10, high = options.kv_memory_bytes;
  while (low + 1024 < high) {
    options.kv_memory_bytes = low + (high - low) / 2;
    bool fits = true;
    try {
      fits = Engine::plan(options).max_context >= churn::kContext;
    } catch (const Error&) {
      fits = false;
    }
    (fits ? high : low) = options.kv_memory_bytes;
  }
  options.kv_memory_bytes = static_cast<size_t>(static_cast<double>(high) * factor);
  return options;
}

void GpuSpeculation::expect_churn(const std::string& speculate) {
  const std::vector<int32_t> text =
      values_of<int32_t>(reference_file(model()), "validation.input_ids");
  EngineOptions roomy = options_for(model());
  roomy.prefix_cache = false;
  const std::unique_ptr<Engine> cold = Engine::load(roomy);
  // A request has one state, and its prefix cache takes three more.
  const double factor = churn::has_states(model()) ? 5 : 1.3;
  const std::unique_ptr<Engine> engine =
      Engine::load(tight(drafting(options_for(model()), speculate, 5), factor));
  std::mt19937 random(11);
  std::map<int64_t, std::vector<int32_t>> wanted, seen;
  int added = 0, compared = 0;
  while (added < 60 || !engine->idle()) {
    if (added < 60 && random() % 3 == 0) {
      GenerateRequest request;
      request.tokens = churn::random_prompt(text, random);
      request.sampling.max_new_tokens = churn::kNewTokens;
      request.sampling.ignore_eos = true;
      request.sampling.temperature = 0.5f * static_cast<float>(random() % 3);
      request.sampling.seed = random();
      wanted[engine->add(request)] = cold->generate({&request, 1}).front().tokens;
      ++added;
    }
    if (random() % 24 == 0 && !wanted.empty())
      engine->cancel(std::next(wanted.begin(), random() % wanted.size())->first);
    for (const TokenEvent& event : engine->step()) {
      if (event.token >= 0) seen[event.request].push_back(event.token);
      if (event.finish == FinishReason::none) continue;
      if (event.finish != FinishReason::cancelled) {
        EXPECT_EQ(seen[event.request], wanted.at(event.request)) << event.error;
        ++compared;
      }
      wanted.erase(event.request);
    }
  }
  EXPECT_GT(compared, 30);
  // Pools of models with windows or chunks are planned with room for more requests.
  const bool is_tight = engine->stats().kv_pages < 2 * churn::kContext / churn::kPageSize;
  if (is_tight && model() != "llama4_text") {
    EXPECT_GT(engine->stats().preemptions, 0);
  }
  EXPECT_GT(engine->stats().prefix_hits, 0);
  EXPECT_GT(engine->stats().accepted_drafts, 0);
  expect_no_leak(*engine);
}

TEST_P(GpuSpeculation, TextUnderMemoryPressureIsThatOfTheRequestAlone) { expect_churn("ngram"); }

// Features are stored and gathered inside graphs, at the slots of each pass.
class GpuEagle : public GpuSpeculation {};

TEST_P(GpuEagle, TextIsThatWithoutAHead) {
  const std::vector<GenerateRequest> requests = requests_of_all_kinds(model());
  const std::vector<GenerateResult> wanted = Engine::load(options_for(model()))->generate(requests);
  for (const auto& [graphs, page_size] : {std::pair(true, 16), {true, 3}, {false, 16}}) {
    SCOPED_TRACE(std::string(graphs ? "replayed" : "enqueued") + ", pages of " +
                 std::to_string(page_size));
    EngineOptions options = drafting(options_for(model()), head_of(model()), 4);
    options.cuda_graphs = graphs;
    options.page_size = page_size;
    expect_texts(options, requests, wanted);
  }
}

// As many drafts of greedy texts are right as on the CPU, whose texts differ by its f32, also after
// a prefix hit.
TEST_P(GpuEagle, DraftsAreAsGoodAsOnACpu) {
  std::vector<GenerateRequest> requests;
  for (const ReferencePrompt& prompt : read_reference(model()))
    requests.push_back(greedy_request(prompt));
  int64_t accepted[2][2] = {};
  for (const bool on_gpu : {false, true}) {
    EngineOptions options = drafting(options_for(model()), head_of(model()), 4);
    if (!on_gpu) options.device = "cpu";
    const std::unique_ptr<Engine> engine = Engine::load(options);
    for (int64_t& count : accepted[on_gpu]) {
      const int64_t before = engine->stats().accepted_drafts;
      for (const GenerateRequest& request : requests) (void)engine->generate({&request, 1});
      count = engine->stats().accepted_drafts - before;
    }
    EXPECT_GT(engine->stats().prefix_hits, 0);
  }
  for (int round = 0; round < 2; ++round) {
    const double cpu = static_cast<double>(accepted[0][round]);
    EXPECT_NEAR(static_cast<double>(accepted[1][round]), cpu, 0.25 * cpu) << "round " << round;
  }
  EXPECT_EQ(accepted[1][0], accepted[1][1]) << "batch-invariant";
}

// Trees of drafts of a head, or of a draft model. The keys of a path are not where those of a chain
// are, so that sums round in another way: text is judged by exact logits.
class GpuTrees : public GpuSpeculation {
 protected:
  EngineOptions trees(const std::string& model, int32_t max_drafts, int32_t branches) const {
    const bool has_head = model == "llama" || model == "deepseek_v3";
    EngineOptions options =
        drafting(options_for(model), has_head ? head_of(model) : kTrained, max_drafts);
    options.draft_branches = branches;
    return options;
  }
};

TEST_P(GpuTrees, TextIsExactAndGraphsChangeNoBit) {
  ExactText exact(model());
  std::vector<GenerateRequest> requests;
  const std::vector<ReferencePrompt> prompts = read_reference(model());
  for (const ReferencePrompt& prompt : prompts) requests.push_back(greedy_request(prompt));
  for (const auto& [max_drafts, branches] : {std::pair(4, 2), {12, 3}, {30, 8}}) {
    SCOPED_TRACE(std::to_string(max_drafts) + " drafts, " + std::to_string(branches) + " branches");
    std::vector<std::vector<GenerateResult>> results;
    for (const bool graphs : {true, false}) {
      EngineOptions options = trees(model(), max_drafts, branches);
      options.cuda_graphs = graphs;
      const std::unique_ptr<Engine> engine = Engine::load(options);
      results.push_back(engine->generate(requests));
      EXPECT_GT(engine->stats().accepted_drafts, 30);
      expect_no_leak(*engine);
    }
    for (size_t i = 0; i < requests.size(); ++i) {
      EXPECT_EQ(results[0][i].tokens, results[1][i].tokens) << i;
      exact.expect_greedy(prompts[i], results[0][i].tokens, "prompt " + std::to_string(i));
    }
  }
}

TEST_P(GpuTrees, DraftsAreAsGoodAsOnACpu) {
  std::vector<GenerateRequest> requests;
  for (const ReferencePrompt& prompt : read_reference(model())) {
    for (const float temperature : {0.0f, 0.7f}) {
      requests.push_back(greedy_request(prompt));
      requests.back().sampling.temperature = temperature;
      requests.back().sampling.seed = 7;
    }
  }
  double tokens_a_step[2];
  for (const bool on_gpu : {false, true}) {
    EngineOptions options = trees(model(), 8, 3);
    if (!on_gpu) options.device = "cpu";
    const std::unique_ptr<Engine> engine = Engine::load(options);
    for (int round = 0; round < 2; ++round) {
      for (const GenerateRequest& request : requests) (void)engine->generate({&request, 1});
    }
    const EngineStats& stats = engine->stats();
    EXPECT_GT(stats.prefix_hits, 0);
    tokens_a_step[on_gpu] =
        1 + static_cast<double>(stats.accepted_drafts) / static_cast<double>(stats.draft_requests);
  }
  EXPECT_NEAR(tokens_a_step[1], tokens_a_step[0], 0.1 * tokens_a_step[0]);
}

INSTANTIATE_TEST_SUITE_P(Models, GpuTrees,
                         ::testing::Values("llama", "gemma2", "gpt_oss", "deepseek_v3"),
                         [](const auto& test) { return std::string(test.param); });

TEST_P(GpuEagle, TextUnderMemoryPressureIsThatOfTheRequestAlone) { expect_churn(head_of(model())); }

INSTANTIATE_TEST_SUITE_P(Models, GpuEagle, ::testing::Values("llama", "deepseek_v3", "qwen3_next"),
                         [](const auto& test) { return std::string(test.param); });

// Linear layers of random networks, which write in so few tokens that n-grams are often right.
class GpuDraftsOfGoldens : public ::testing::TestWithParam<const char*> {};

TEST_P(GpuDraftsOfGoldens, TokensAreThoseWithout) {
  if (!why_no_gpu().empty()) GTEST_SKIP() << why_no_gpu();
  const std::vector<int32_t> text = churn::text_of(GetParam());
  std::mt19937 random(3);
  std::vector<GenerateRequest> requests(8);
  for (GenerateRequest& request : requests) {
    request.tokens = churn::random_prompt(text, random);
    request.sampling.max_new_tokens = 24;
    request.sampling.ignore_eos = true;
    for (int32_t i = 0; i < churn::kFewTokens; ++i) {
      request.sampling.logit_bias.push_back({churn::kFirstToken + i, 100.0f});
    }
  }
  EngineOptions options = options_for(GetParam());
  options.max_context = 512;
  const std::vector<GenerateResult> wanted = Engine::load(options)->generate(requests);
  for (const bool graphs : {true, false}) {
    options.cuda_graphs = graphs;
    const std::unique_ptr<Engine> engine = Engine::load(drafting(options, "ngram", 4));
    for (const bool warm : {false, true}) {
      const std::vector<GenerateResult> seen = engine->generate(requests);
      for (size_t i = 0; i < requests.size(); ++i) {
        EXPECT_EQ(seen[i].tokens, wanted[i].tokens) << i << (warm ? " warm" : " cold");
      }
    }
    EXPECT_GT(engine->stats().accepted_drafts, 3);
    EXPECT_GT(engine->stats().drafts, engine->stats().accepted_drafts);
    expect_no_leak(*engine);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GpuDraftsOfGoldens,
                         ::testing::Values("granitemoehybrid", "kimi_linear", "mamba", "lfm2",
                                           "lfm2_moe"),
                         [](const auto& test) { return std::string(test.param); });

INSTANTIATE_TEST_SUITE_P(Models, GpuSpeculation,
                         ::testing::Values("llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3",
                                           "llama4_text", "qwen3_next"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace fovea
