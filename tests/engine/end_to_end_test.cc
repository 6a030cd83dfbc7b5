// SPDX-License-Identifier: Apache-2.0
// Every model of testdata continues the reference prompts exactly as the reference does.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/reference_text.h"
#include "engine/small_engine.h"
#include "fovea/engine.h"
#include "fovea/error.h"
#include "support/expect_close.h"

namespace fovea {
namespace {

EngineOptions options_for(const std::string& model, const std::string& backend) {
  EngineOptions options;
  options.model_path = model_folder(model);
  options.backend = parse_backend_wish(backend);
  options.kv_memory_bytes = size_t{64} << 20;
  options.max_context = 1024;
  options.max_requests = 8;
  options.max_batch_tokens = 256;
  options.threads = 2;
  return options;
}

class EndToEnd : public ::testing::TestWithParam<std::tuple<const char*, const char*>> {
 protected:
  std::string model() const { return std::get<0>(GetParam()); }
  std::string backend() const { return std::get<1>(GetParam()); }
  std::unique_ptr<Engine> load() const { return Engine::load(options_for(model(), backend())); }
};

TEST_P(EndToEnd, LogitsMatchTheReference) {
  const std::unique_ptr<Engine> engine = load();
  for (const ReferencePrompt& prompt : read_reference(model())) {
    const std::vector<float> logits = engine->logits(prompt.tokens);
    const size_t width = static_cast<size_t>(engine->vocabulary());
    ASSERT_EQ(logits.size(), prompt.tokens.size() * width);
    for (size_t i = 0; i < width; ++i) {
      const float got = logits[logits.size() - width + i];
      ASSERT_TRUE(std::isfinite(got)) << "token " << i;
      ASSERT_TRUE(test::is_near(got, prompt.last_logits[i], 2e-3f))
          << prompt.tokens.size() << " tokens, token " << i;
    }
  }
  expect_no_leak(*engine);
}

TEST_P(EndToEnd, GreedyTextAloneColdAndWarm) {
  const std::unique_ptr<Engine> engine = load();
  for (const ReferencePrompt& prompt : read_reference(model())) {
    const GenerateRequest request = greedy_request(prompt);
    for (const bool warm : {false, true}) {
      const GenerateResult result = engine->generate({&request, 1}).front();
      EXPECT_EQ(result.tokens, prompt.greedy) << prompt.tokens.size() << (warm ? " warm" : " cold");
      EXPECT_EQ(result.finish, FinishReason::length);
      EXPECT_EQ(result.prompt_tokens, static_cast<int32_t>(prompt.tokens.size()));
      const int32_t cacheable = (result.prompt_tokens - 1) / 16 * 16;
      if (warm) {
        EXPECT_EQ(result.cached_tokens, cacheable);
      }
    }
  }
  expect_no_leak(*engine);
}

TEST_P(EndToEnd, GreedyTextBatched) {
  const std::unique_ptr<Engine> engine = load();
  const std::vector<ReferencePrompt> all = read_reference(model());
  std::vector<GenerateRequest> requests;
  for (const ReferencePrompt& prompt : all) requests.push_back(greedy_request(prompt));
  for (const bool warm : {false, true}) {
    const std::vector<GenerateResult> results = engine->generate(requests);
    for (size_t i = 0; i < all.size(); ++i)
      EXPECT_EQ(results[i].tokens, all[i].greedy) << i << (warm ? " warm" : " cold");
  }
  EXPECT_GT(engine->stats().prefix_hits, 0);
  expect_no_leak(*engine);
}

// Page sizes that divide nothing, and chunks smaller than a page or a window.
TEST(EndToEndShapes, PageSizesAndChunksDoNotMatter) {
  for (const char* model : {"llama", "gemma2", "deepseek_v3", "llama4_text", "qwen3_next"}) {
    const std::vector<ReferencePrompt> all = read_reference(model);
    for (const auto& [page_size, batch_tokens] : {std::pair{1, 64}, {3, 7}, {64, 50}, {256, 200}}) {
      EngineOptions options = options_for(model, "auto");
      options.page_size = page_size;
      options.max_batch_tokens = batch_tokens;
      const std::unique_ptr<Engine> engine = Engine::load(options);
      std::vector<GenerateRequest> requests;
      for (size_t i = 1; i < 4; ++i) {
        requests.push_back(greedy_request(all[i]));
        requests.back().sampling.max_new_tokens = 10;
      }
      for (const bool warm : {false, true}) {
        const std::vector<GenerateResult> results = engine->generate(requests);
        for (size_t i = 0; i < results.size(); ++i)
          EXPECT_TRUE(std::equal(results[i].tokens.begin(), results[i].tokens.end(),
                                 all[i + 1].greedy.begin()))
              << model << ", pages of " << page_size << ", prompt " << i << " warm " << warm;
      }
      if (page_size <= 64) {
        EXPECT_GT(engine->stats().prefix_hits, 0) << model << " " << page_size;
      }
      expect_no_leak(*engine);
    }
  }
}

std::string case_name(const ::testing::TestParamInfo<EndToEnd::ParamType>& info) {
  return fmt::format("{}_{}", std::get<0>(info.param), std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Models, EndToEnd,
                         ::testing::Combine(::testing::ValuesIn(kTestModels),
                                            ::testing::Values("cpu", "reference")),
                         case_name);

}  // namespace
}  // namespace fovea
