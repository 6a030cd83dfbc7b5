// SPDX-License-Identifier: Apache-2.0
// Text that is served with cached prefixes, preemption and cancellation, in a pool for little more
// than one prompt, equals the text of an engine without any of them. So does text of passes that
// are enqueued ahead, and of passes that verify drafts.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "engine/tight_engine.h"
#include "fovea/engine.h"
#include "support/cases.h"

namespace fovea {
namespace {

using churn::kNewTokens;
using churn::Passes;

// A model, and the order of its passes.
class Churn : public ::testing::TestWithParam<std::tuple<const char*, Passes>> {
 protected:
  Churn() : text_(churn::text_of(model_)) {}

  const std::string model_ = std::get<0>(GetParam());
  const Passes passes_ = std::get<1>(GetParam());
  std::vector<int32_t> text_;
  std::mt19937 random_{11};
};

TEST_P(Churn, TokensEqualThoseOfTheColdPath) {
  const std::unique_ptr<Engine> cold = Engine::load(churn::roomy_options(model_));
  const std::unique_ptr<Engine> engine = churn::tight_engine(model_, passes_);
  std::map<int64_t, GenerateRequest> requests;
  std::map<int64_t, std::vector<int32_t>> produced;
  const int total = 60 * test::test_scale();
  int added = 0, compared = 0, cancelled = 0;
  int64_t cached_tokens = 0;
  while (added < total || !engine->idle()) {
    if (added < total && random_() % 3 == 0) {
      GenerateRequest request;
      request.tokens = churn::random_prompt(text_, random_);
      request.sampling.max_new_tokens = kNewTokens;
      request.sampling.ignore_eos = true;
      for (int32_t i = 0; is_golden(model_) && i < churn::kFewTokens; ++i)
        request.sampling.logit_bias.push_back({churn::kFirstToken + i, 100.0f});
      requests[engine->add(request)] = request;
      ++added;
    }
    if (random_() % 24 == 0 && !requests.empty())
      engine->cancel(std::next(requests.begin(), random_() % requests.size())->first);
    for (const TokenEvent& event : engine->step()) {
      if (event.token >= 0) produced[event.request].push_back(event.token);
      if (event.finish == FinishReason::none) continue;
      cached_tokens += event.cached_tokens;
      if (event.finish == FinishReason::cancelled) {
        ++cancelled;
      } else {
        const GenerateRequest& request = requests.at(event.request);
        EXPECT_EQ(produced[event.request], cold->generate({&request, 1}).front().tokens)
            << "prompt of " << request.tokens.size();
        ++compared;
      }
      requests.erase(event.request);
    }
  }
  EXPECT_EQ(compared + cancelled, total);
  EXPECT_GT(cancelled, 0);
  EXPECT_GT(cached_tokens, 0);
  if (!churn::has_states(model_)) {
    EXPECT_GT(engine->stats().preemptions, 0);
  }
  const bool has_overlapped = engine->stats().overlapped_steps > 0;
  EXPECT_EQ(has_overlapped, passes_ == Passes::overlapped && !churn::has_states(model_));
  EXPECT_EQ(engine->stats().accepted_drafts > 0, churn::verifies(passes_));
  EXPECT_EQ(engine->stats().drafts > engine->stats().accepted_drafts, churn::verifies(passes_));
  engine->clear_prefix_cache();
  EXPECT_EQ(engine->stats().kv_pages_free, engine->stats().kv_pages);
}

std::string name_of(const ::testing::TestParamInfo<Churn::ParamType>& info) {
  return churn::name_of(std::get<0>(info.param), std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Models, Churn,
                         ::testing::Combine(::testing::ValuesIn(kTestModels),
                                            ::testing::Values(Passes::one_by_one)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Goldens, Churn,
                         ::testing::Combine(::testing::Values("granitemoehybrid", "kimi_linear",
                                                              "mamba", "lfm2", "lfm2_moe"),
                                            ::testing::Values(Passes::one_by_one)),
                         name_of);
// Models with full attention, with windows and with recurrent states.
INSTANTIATE_TEST_SUITE_P(Overlapped, Churn,
                         ::testing::Combine(::testing::Values("llama", "gpt_oss", "qwen3_next"),
                                            ::testing::Values(Passes::overlapped)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(
    Speculative, Churn,
    ::testing::Combine(::testing::Values("llama", "gemma2", "gpt_oss", "deepseek_v3", "llama4_text",
                                         "qwen3_next", "granitemoehybrid", "kimi_linear", "mamba",
                                         "lfm2", "lfm2_moe"),
                       ::testing::Values(Passes::speculative)),
    name_of);

INSTANTIATE_TEST_SUITE_P(Drawn, Churn,
                         ::testing::Combine(::testing::Values("llama", "gpt_oss", "qwen3_next"),
                                            ::testing::Values(Passes::drawn)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Eagle, Churn,
                         ::testing::Combine(::testing::Values("llama", "deepseek_v3", "qwen3_next"),
                                            ::testing::Values(Passes::eagle, Passes::eagle_drawn)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Trees, Churn,
                         ::testing::Combine(::testing::Values("llama", "gemma2", "gpt_oss",
                                                              "deepseek_v3", "llama4_text"),
                                            ::testing::Values(Passes::trees)),
                         name_of);

}  // namespace
}  // namespace fovea
