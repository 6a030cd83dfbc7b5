// SPDX-License-Identifier: Apache-2.0
// Whole models on a GPU, through the engine: against the reference outputs of each checkpoint,
// cold, with prefix hits and in batches, with replayed and enqueued decode steps. Skipped without a
// GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "engine/reference_text.h"
#include "fovea/engine.h"
#include "fovea/error.h"
#include "fovea/gpu.h"
#include "fovea/kernel_pack.h"
#include "fovea/verify_model.h"
#include "gpu/exact_text.h"
#include "gpu/golden_logits.h"
#include "support/error_budget.h"

namespace fovea {
namespace {

class GpuModels : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!why_no_gpu().empty()) GTEST_SKIP() << why_no_gpu();
  }
  std::string model() const { return GetParam(); }

  void expect_greedy(const ReferencePrompt& prompt, const std::vector<int32_t>& tokens,
                     const std::string& what) {
    exact_.expect_greedy(prompt, tokens, what);
  }

  ExactText exact_{GetParam()};
};

TEST_P(GpuModels, LogitsAreWithinTheBudgetOfTheReference) {
  const std::unique_ptr<Engine> engine = Engine::load(gpu_options(model()));
  for (const ReferencePrompt& prompt : read_reference(model())) {
    const std::vector<float> logits = engine->logits(prompt.tokens);
    const auto width = static_cast<size_t>(engine->vocabulary());
    float worst = 0;
    for (size_t i = 0; i < width; ++i) {
      const float difference = std::fabs(logits[logits.size() - width + i] - prompt.last_logits[i]);
      worst = std::max(worst, std::isnan(difference) ? INFINITY : difference);
    }
    const bool tied_experts = model() == "deepseek_v3" && prompt.tokens.size() == 150;
    EXPECT_LE(worst, tied_experts ? test::kOtherExpertLogits : test::kBf16ModelLogits)
        << prompt.tokens.size() << " tokens";
  }
}

TEST_P(GpuModels, ContinueTheReferencePromptsColdWarmAndBatched) {
  const std::unique_ptr<Engine> engine = Engine::load(gpu_options(model()));
  const std::vector<ReferencePrompt> prompts = read_reference(model());
  std::vector<GenerateRequest> requests;
  for (const ReferencePrompt& prompt : prompts) requests.push_back(greedy_request(prompt));
  for (size_t i = 0; i < prompts.size(); ++i) {
    for (const bool warm : {false, true}) {
      const GenerateResult result = engine->generate({&requests[i], 1}).front();
      expect_greedy(prompts[i], result.tokens, std::to_string(i) + (warm ? " warm" : " cold"));
      if (warm) {
        EXPECT_EQ(result.cached_tokens, (result.prompt_tokens - 1) / 16 * 16);
      }
    }
  }
  engine->clear_prefix_cache();
  for (const bool warm : {false, true}) {
    const std::vector<GenerateResult> results = engine->generate(requests);
    for (size_t i = 0; i < prompts.size(); ++i) {
      expect_greedy(prompts[i], results[i].tokens,
                    std::to_string(i) + (warm ? " batched, warm" : " batched, cold"));
    }
  }
  engine->clear_prefix_cache();
  EXPECT_EQ(engine->stats().kv_pages_free, engine->stats().kv_pages);
}

// Page sizes that divide nothing, and passes smaller than a page or a window.
TEST_P(GpuModels, DoNotDependOnPagesAndChunks) {
  const ReferencePrompt prompt = read_reference(model())[3];
  const GenerateRequest request = greedy_request(prompt);
  for (const int32_t page_size : {1, 3, 64}) {
    EngineOptions options = gpu_options(model());
    options.page_size = page_size;
    options.max_batch_tokens = 61;
    const std::unique_ptr<Engine> engine = Engine::load(options);
    for (const bool warm : {false, true}) {
      expect_greedy(prompt, engine->generate({&request, 1}).front().tokens,
                    "pages of " + std::to_string(page_size) + (warm ? ", warm" : ", cold"));
    }
  }
}

// Compares the log-probabilities of every token and its alternatives bit by bit: one prompt after
// another, and all together, so that batches shrink through several graph sizes.
TEST_P(GpuModels, ReplayedAndEnqueuedStepsAreBitwiseEqual) {
  const std::vector<ReferencePrompt> prompts = read_reference(model());
  std::vector<GenerateRequest> requests;
  for (const ReferencePrompt& prompt : prompts) {
    requests.push_back(greedy_request(prompt));
    requests.back().sampling.max_new_tokens = 10 + 9 * static_cast<int32_t>(requests.size());
    requests.back().sampling.logprobs = 20;
  }
  std::vector<std::vector<GenerateResult>> results;
  for (const bool graphs : {true, false}) {
    EngineOptions options = gpu_options(model());
    options.cuda_graphs = graphs;
    const std::unique_ptr<Engine> engine = Engine::load(options);
    results.push_back(engine->generate(requests));
    std::vector<GenerateResult> alone = engine->generate({&requests[2], 1});
    results.back().push_back(std::move(alone.front()));
  }
  for (size_t i = 0; i < results[0].size(); ++i) {
    const GenerateResult &replayed = results[0][i], &enqueued = results[1][i];
    EXPECT_EQ(replayed.tokens, enqueued.tokens) << i;
    EXPECT_EQ(replayed.logprobs, enqueued.logprobs) << i;
    ASSERT_EQ(replayed.top.size(), enqueued.top.size());
    for (size_t t = 0; t < replayed.top.size(); ++t) {
      for (size_t k = 0; k < replayed.top[t].size(); ++k) {
        EXPECT_EQ(replayed.top[t][k].token, enqueued.top[t][k].token) << i << " " << t;
        EXPECT_EQ(replayed.top[t][k].logprob, enqueued.top[t][k].logprob) << i << " " << t;
      }
    }
  }
}

bool sees_all_keys(const GroupSelection& group) {
  const AttentionSpec& spec = group.request.spec;
  return spec.kind == AttentionKind::mha && spec.window == 0 && spec.chunk == 0;
}

// Requests to which the prefix cache gave the same pages. Steps read these pages once, for every
// number of requests and with other requests between them.
TEST_P(GpuModels, ReadSharedPrefixesOnce) {
  const std::vector<ReferencePrompt> prompts = read_reference(model());
  for (const bool graphs : {true, false}) {
    EngineOptions options = gpu_options(model());
    options.kv_memory_bytes = size_t{256} << 20;
    options.max_requests = 20;
    options.min_prefix_savings = 1;
    options.cuda_graphs = graphs;
    const std::unique_ptr<Engine> engine = Engine::load(options);
    const int32_t sizes = 6;  // 1, 2, 4, 8, 16, 20
    const bool shares = std::ranges::any_of(engine->selections(), sees_all_keys);
    const int32_t decodes = shares ? 2 * sizes - 1 : sizes;
    EXPECT_EQ(engine->stats().graphs.count(), graphs ? decodes + 3 * 5 : 0);
    std::vector<GenerateRequest> requests;
    for (int i = 0; i < 20; ++i) {
      requests.push_back(greedy_request(prompts[i % 3 == 0 ? 2 : 3 + i % 2]));
      // The batch shrinks step by step, but each size lasts at least 20 tokens.
      requests.back().sampling.max_new_tokens = 64 - 2 * i;
    }
    (void)engine->generate(std::span(requests).first(5));
    const std::vector<GenerateResult> results = engine->generate(requests);
    EXPECT_EQ(engine->stats().shared_steps > 0, shares);
    for (int i = 0; i < 20; ++i) {
      ReferencePrompt prompt = prompts[i % 3 == 0 ? 2 : 3 + i % 2];
      prompt.greedy.resize(static_cast<size_t>(64 - 2 * i));
      expect_greedy(prompt, results[static_cast<size_t>(i)].tokens,
                    std::to_string(i) + (graphs ? " replayed" : " enqueued"));
    }
  }
}

// The engine draws tokens on the CPU for requests that want log-probabilities, from the same
// logits.
TEST_P(GpuModels, DrawTheTokensThatTheCpuDraws) {
  const std::vector<ReferencePrompt> prompts = read_reference(model());
  EngineOptions options = gpu_options(model());
  options.prefix_cache = false;  // with it, the passes of the second run would differ
  const std::unique_ptr<Engine> engine = Engine::load(options);
  std::vector<GenerateRequest> requests;
  for (const ReferencePrompt& prompt : prompts) {
    requests.push_back(greedy_request(prompt));
    SamplingParams& sampling = requests.back().sampling;
    sampling.seed = requests.size();
    sampling.temperature = 0.7f + 0.1f * static_cast<float>(requests.size());
    if (requests.size() > 1) sampling.top_k = 30;
    if (requests.size() > 2) sampling.top_p = 0.9f;
    if (requests.size() > 3) sampling.min_p = 0.02f;
    requests.push_back(requests.back());  // the same from the tokens that a schema allows
    requests.back().sampling.json_schema = R"({"type":"object"})";
  }
  const std::vector<GenerateResult> drawn = engine->generate(requests);
  for (GenerateRequest& request : requests) request.sampling.logprobs = 0;
  const std::vector<GenerateResult> wanted = engine->generate(requests);
  for (size_t i = 0; i < drawn.size(); ++i) EXPECT_EQ(drawn[i].tokens, wanted[i].tokens) << i;
}

// Returns requests that begin and end in different steps, by length or by a token.
std::vector<GenerateRequest> changing_requests(const std::vector<ReferencePrompt>& prompts) {
  std::vector<GenerateRequest> requests;
  for (int i = 0; i < 24; ++i) {
    requests.push_back(greedy_request(prompts[static_cast<size_t>(i) % prompts.size()]));
    SamplingParams& sampling = requests.back().sampling;
    sampling.max_new_tokens = 5 + i * 7 % 40;
    sampling.seed = static_cast<uint64_t>(i);
    sampling.temperature = i % 3 == 0 ? 0.0f : 1.2f;
    sampling.stop_tokens = {5 + i, 40 + i, 80 + 2 * i};
    if (i % 4 == 1) sampling.json_schema = R"({"type":"array","items":{"type":"string"}})";
  }
  return requests;
}

void expect_same_text(const std::vector<GenerateResult>& got,
                      const std::vector<GenerateResult>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].tokens, want[i].tokens) << i;
    EXPECT_EQ(got[i].text, want[i].text) << i;
    EXPECT_EQ(got[i].finish, want[i].finish) << i;
  }
}

// Nearly every step computes decodes and a chunk of a prompt, in a graph or enqueued.
TEST_P(GpuModels, TextIsTheSameWithoutGraphs) {
  const std::vector<GenerateRequest> requests = changing_requests(read_reference(model()));
  std::vector<std::vector<GenerateResult>> results;
  for (const bool graphs : {true, false}) {
    EngineOptions options = gpu_options(model());
    options.max_mixed_tokens = 40;
    options.cuda_graphs = graphs;
    const std::unique_ptr<Engine> engine = Engine::load(options);
    results.push_back(engine->generate(requests));
    EXPECT_EQ(engine->stats().graphs.chunks.graphs > 0, graphs);
  }
  expect_same_text(results[0], results[1]);
}

// Tokens go from pass to pass on the device, while requests begin and end.
TEST_P(GpuModels, TextIsTheSameWithoutOverlap) {
  const std::vector<GenerateRequest> requests = changing_requests(read_reference(model()));
  const bool has_states = model() == "qwen3_next";  // its passes follow one another
  std::vector<std::vector<GenerateResult>> results;
  for (const bool overlap : {true, false}) {
    EngineOptions options = gpu_options(model());
    options.batch_invariant = true;  // passes need not be the same
    options.overlap = overlap;
    const std::unique_ptr<Engine> engine = Engine::load(options);
    results.push_back(engine->generate(requests));
    EXPECT_EQ(engine->stats().overlapped_steps > 0, overlap && !has_states);
    engine->clear_prefix_cache();
    EXPECT_EQ(engine->stats().kv_pages_free, engine->stats().kv_pages);
  }
  expect_same_text(results[0], results[1]);
}

// With batch_invariant the log-probabilities of a text have the same bits alone and with other
// requests, cold and after prefix hits. Its prompt is cut differently there, and its steps run in
// other graphs.
TEST_P(GpuModels, BatchInvariantBits) {
  std::vector<GenerateRequest> requests;
  for (const ReferencePrompt& prompt : read_reference(model())) {
    requests.push_back(greedy_request(prompt));
    requests.back().sampling.max_new_tokens = 10 + 5 * static_cast<int32_t>(requests.size());
    requests.back().sampling.logprobs = 20;
  }
  const auto bits = [](const GenerateResult& result) {
    std::vector<float> values = result.logprobs;
    for (const auto& top : result.top)
      for (const TokenLogprob& entry : top) values.push_back(entry.logprob);
    return values;
  };
  const bool latent = model() == "deepseek_v3";
  for (const char* backend : {latent ? "mla" : "flash", latent ? "portable_mla" : "portable"}) {
    EngineOptions options = gpu_options(model());
    options.batch_invariant = true;
    options.backend = parse_backend_wish(std::string("prefer:") + backend);
    const std::unique_ptr<Engine> engine = Engine::load(options);
    std::vector<GenerateResult> alone;
    for (const GenerateRequest& request : requests) {
      engine->clear_prefix_cache();
      alone.push_back(engine->generate({&request, 1}).front());
    }
    engine->clear_prefix_cache();
    for (const bool warm : {false, true}) {
      const std::vector<GenerateResult> together = engine->generate(requests);
      for (size_t i = 0; i < requests.size(); ++i) {
        const std::string what =
            std::string(backend) + ", " + std::to_string(i) + (warm ? " warm" : " cold");
        EXPECT_EQ(together[i].tokens, alone[i].tokens) << what;
        EXPECT_TRUE(bits(together[i]) == bits(alone[i])) << what;
      }
    }
  }
}

TEST_P(GpuModels, PerplexityIsThatOfTheReference) {
  VerifyOptions options;
  options.engine = gpu_options(model());
  options.engine.max_context = 2048;
  options.kv_dtypes = {DType::bf16, DType::f8e4m3};
  std::set<std::string> served;
  for (const VerifyRow& row :
       verify_model(options)) {  // one row per backend that accepts the model
    if (!row.unsupported.empty() && !kernel_sources().why_no_compiler.empty()) continue;
    EXPECT_TRUE(row.pass) << row.backend << " " << dtype_name(row.kv_dtype) << ": "
                          << row.unsupported << ", perplexity changed by " << row.perplexity_change;
    served.insert(row.backend);
  }
  const bool latent = model() == "deepseek_v3";
  std::set<std::string> wanted = {latent ? "portable_mla" : "portable"};
  if (find_device("cuda").sm == 90) wanted.insert(latent ? "mla" : "flash");
  EXPECT_EQ(served, wanted);
}

INSTANTIATE_TEST_SUITE_P(Models, GpuModels,
                         ::testing::Values("llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3",
                                           "llama4_text", "qwen3_next"),
                         [](const auto& test) { return std::string(test.param); });

class GpuGoldens : public ::testing::TestWithParam<std::string> {};

TEST_P(GpuGoldens, LogitsAreWithinTwiceTheLossOfBf16) {
  if (!why_no_gpu().empty()) GTEST_SKIP() << why_no_gpu();
  for (const int32_t max_tokens : {200, 61}) {
    SCOPED_TRACE("passes of " + std::to_string(max_tokens));
    EngineOptions options = gpu_options(GetParam());
    options.max_context = 512;
    options.max_batch_tokens = max_tokens;
    expect_golden_logits(*Engine::load(options), GetParam());
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GpuGoldens, ::testing::ValuesIn(golden_models()),
                         [](const auto& test) { return test.param; });

// Random networks have no margin between tokens, so their text is compared bit by bit.
class GpuStates : public ::testing::TestWithParam<const char*> {};

TEST_P(GpuStates, PrefixHitsBatchesAndReplaysChangeNoToken) {
  if (!why_no_gpu().empty()) GTEST_SKIP() << why_no_gpu();
  const SafetensorsFile file = reference_file(GetParam());
  std::vector<GenerateRequest> requests(4);
  for (size_t i = 0; i < requests.size(); ++i) {
    const std::string name = "prompt_" + std::to_string(i + 1) + ".input_ids";
    requests[i].tokens = values_of<int32_t>(file, name);
    requests[i].sampling.max_new_tokens = 24;
    requests[i].sampling.ignore_eos = true;
  }
  EngineOptions options = gpu_options(GetParam());
  options.max_context = 512;
  options.max_batch_tokens = 61;
  options.batch_invariant = true;
  options.cuda_graphs = false;
  std::vector<std::vector<int32_t>> cold;
  const std::unique_ptr<Engine> enqueued = Engine::load(options);
  for (const GenerateRequest& request : requests) {
    cold.push_back(enqueued->generate({&request, 1}).front().tokens);
  }
  options.cuda_graphs = true;
  const std::unique_ptr<Engine> engine = Engine::load(options);
  for (const bool warm : {false, true}) {
    const std::vector<GenerateResult> results = engine->generate(requests);
    for (size_t i = 0; i < results.size(); ++i) {
      EXPECT_EQ(results[i].tokens, cold[i]) << i << (warm ? " warm" : " cold");
      if (warm) {
        EXPECT_GT(results[i].cached_tokens, 0) << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GpuStates,
                         ::testing::Values("granitemoehybrid", "granitemoehybrid_rope",
                                           "kimi_linear", "mamba", "mamba_plain", "lfm2",
                                           "lfm2_plain", "lfm2_moe"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace fovea
