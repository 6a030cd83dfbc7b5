// SPDX-License-Identifier: Apache-2.0
// Sampled text under memory pressure: seeds, filters, log-probabilities, schemas, stop strings and
// salts, with cached prefixes, preemption, cancellation, forgotten prefixes and calls of logits()
// in between, in a pool for little more than one prompt. Every token, bit and character equals
// those of the request alone in an engine without any of these. Passes follow one another, overlap,
// or verify drafts.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "engine/small_engine.h"
#include "engine/tight_engine.h"
#include "support/cases.h"
#include "tokenizer/utf8.h"

namespace fovea {
namespace {

using churn::Passes;

struct Expected {
  GenerateRequest request;
  GenerateResult alone;
  bool stops = false;  // at a stop string; `alone` is then the text before it
  GenerateResult seen;
};

template <typename T>
T one_of(std::initializer_list<T> choices, std::mt19937& random) {
  return choices.begin()[random() % choices.size()];
}

// Temperatures far above 1 draw bytes that form no characters, and characters of several tokens.
SamplingParams random_sampling(std::mt19937& random) {
  SamplingParams params;
  params.max_new_tokens = churn::kNewTokens;
  params.temperature = one_of({0.0f, 0.8f, 3.0f, 100.0f}, random);
  params.top_k = one_of({0, 0, 1, 7, 40}, random);
  params.top_p = one_of({1.0f, 1.0f, 0.9f}, random);
  params.min_p = one_of({0.0f, 0.0f, 0.05f}, random);
  params.seed = random();
  params.logprobs = one_of({-1, 0, 4}, random);
  params.prompt_logprobs = random() % 8 == 0;
  params.ignore_eos = random() % 2 == 0;
  params.json_schema =
      one_of({"", "", "", R"({"type":"object"})", R"({"enum":["a","bc",1]})"}, random);
  return params;
}

// Returns some characters of the text, or nothing if it has none.
std::string random_part(const std::string& text, std::mt19937& random) {
  std::vector<size_t> characters;
  for (size_t i = 0; i < text.size(); ++i)
    if ((text[i] & 0xc0) != 0x80) characters.push_back(i);
  if (characters.empty()) return {};
  const size_t first = random() % characters.size();
  const size_t end = first + 1 + random() % 6;
  const size_t begin = characters[first];
  return text.substr(begin, end < characters.size() ? characters[end] - begin : std::string::npos);
}

void append(GenerateResult& seen, const TokenEvent& event, bool logprobs) {
  Utf8Stream whole;
  EXPECT_EQ(whole.push(event.text), event.text) << "not whole characters";
  seen.text += event.text;
  seen.finish = event.finish;
  seen.prompt_logprobs = event.prompt_logprobs;
  seen.cached_tokens = event.cached_tokens;
  if (event.token < 0) return;
  seen.tokens.push_back(event.token);
  if (!logprobs) return;
  seen.logprobs.push_back(event.logprob);
  seen.top.push_back(event.top);
}

// Returns whether `part` is a prefix of `whole`.
template <typename T>
bool begins(const std::vector<T>& whole, const std::vector<T>& part) {
  return part.size() <= whole.size() && std::equal(part.begin(), part.end(), whole.begin());
}

bool operator==(const TokenLogprob& a, const TokenLogprob& b) {
  return a.token == b.token && a.logprob == b.logprob;
}

void expect_same(const Expected& expected, const Engine& engine) {
  const GenerateResult &seen = expected.seen, &alone = expected.alone;
  const bool whole = seen.finish != FinishReason::cancelled && !expected.stops;
  EXPECT_TRUE(begins(alone.tokens, seen.tokens));
  EXPECT_TRUE(begins(alone.logprobs, seen.logprobs));
  ASSERT_LE(seen.top.size(), alone.top.size());
  for (size_t i = 0; i < seen.top.size(); ++i)
    EXPECT_TRUE(std::ranges::equal(seen.top[i], alone.top[i],
                                   [](const auto& a, const auto& b) { return a == b; }));
  if (!seen.tokens.empty()) {
    EXPECT_EQ(seen.prompt_logprobs, alone.prompt_logprobs);
  }
  if (whole) {
    EXPECT_EQ(seen.finish, alone.finish);
    EXPECT_EQ(seen.tokens.size(), alone.tokens.size());
    EXPECT_EQ(seen.text, alone.text);
  } else if (seen.finish == FinishReason::stop) {
    const std::string& stop = expected.request.sampling.stop.front();
    EXPECT_EQ(seen.text, alone.text.substr(0, alone.text.find(stop))) << "stop: " << stop;
  } else {
    EXPECT_EQ(seen.finish, FinishReason::cancelled) << "a stop string was not seen";
    EXPECT_EQ(seen.text, engine.decode(seen.tokens));
  }
}

// A model, and the order of its passes.
class SampledChurn : public ::testing::TestWithParam<std::tuple<const char*, Passes>> {};

TEST_P(SampledChurn, EverythingIsThatOfTheRequestAlone) {
  const std::string model = std::get<0>(GetParam());
  const Passes passes = std::get<1>(GetParam());
  const std::vector<int32_t> text =
      values_of<int32_t>(reference_file(model), "validation.input_ids");
  EngineOptions roomy = churn::roomy_options(model);
  roomy.batch_invariant = true;
  const std::unique_ptr<Engine> cold = Engine::load(roomy);
  const std::unique_ptr<Engine> engine = churn::tight_engine(model, passes, true);
  std::mt19937 random(13);
  const auto random_request = [&] {
    Expected expected;
    expected.request.tokens = churn::random_prompt(text, random);
    expected.request.sampling = random_sampling(random);
    expected.request.salt = one_of({"", "", "another"}, random);
    expected.alone = cold->generate({&expected.request, 1}).front();
    if (random() % 2 == 0) {
      const std::string part = random_part(expected.alone.text, random);
      expected.stops = !part.empty();
      if (expected.stops) expected.request.sampling.stop = {part};
    }
    return expected;
  };
  const int total = 100 * test::test_scale();
  std::map<int64_t, Expected> running;
  std::map<FinishReason, int> finished;
  int added = 0, stopped = 0;
  int64_t cached_tokens = 0;
  while (added < total || !engine->idle()) {
    if (added < total && random() % 3 == 0) {
      Expected expected = random_request();
      const int64_t id = engine->add(expected.request);
      running.emplace(id, std::move(expected));
      ++added;
    }
    if (random() % 32 == 0 && !running.empty())
      engine->cancel(std::next(running.begin(), random() % running.size())->first);
    if (random() % 64 == 0) engine->clear_prefix_cache();
    if (random() % 64 == 0) {  // takes the memory of other requests, which are recomputed
      const std::vector<int32_t> tokens = churn::random_prompt(text, random);
      EXPECT_EQ(engine->logits(tokens), cold->logits(tokens));
    }
    for (const TokenEvent& event : engine->step()) {
      Expected& expected = running.at(event.request);
      append(expected.seen, event, expected.request.sampling.logprobs >= 0);
      if (event.finish == FinishReason::none) continue;
      SCOPED_TRACE("request " + std::to_string(event.request));
      expect_same(expected, *engine);
      ++finished[event.finish];
      stopped += expected.stops && event.finish == FinishReason::stop;
      cached_tokens += event.cached_tokens;
      running.erase(event.request);
    }
  }
  EXPECT_TRUE(running.empty());
  EXPECT_GT(finished[FinishReason::length], 0);
  EXPECT_GT(finished[FinishReason::cancelled], 0);
  EXPECT_GT(stopped, 5);
  EXPECT_GT(cached_tokens, 0);
  if (!churn::has_states(model)) {
    EXPECT_GT(engine->stats().preemptions, 0);
  }
  const bool has_overlapped = engine->stats().overlapped_steps > 0;
  EXPECT_EQ(has_overlapped, passes == Passes::overlapped && !churn::has_states(model));
  EXPECT_EQ(engine->stats().accepted_drafts > 0, churn::verifies(passes));
  expect_no_leak(*engine);
}

// A model with full attention, one with windows and sinks, one with recurrent states.
std::string name_of(const ::testing::TestParamInfo<SampledChurn::ParamType>& info) {
  return churn::name_of(std::get<0>(info.param), std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Models, SampledChurn,
                         ::testing::Combine(::testing::Values("llama", "gpt_oss", "qwen3_next"),
                                            ::testing::Values(Passes::one_by_one)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Overlapped, SampledChurn,
                         ::testing::Combine(::testing::Values("llama", "gpt_oss"),
                                            ::testing::Values(Passes::overlapped)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Speculative, SampledChurn,
                         ::testing::Combine(::testing::Values("llama", "gpt_oss", "qwen3_next"),
                                            ::testing::Values(Passes::speculative, Passes::drawn)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Eagle, SampledChurn,
                         ::testing::Combine(::testing::Values("llama", "qwen3_next"),
                                            ::testing::Values(Passes::eagle, Passes::eagle_drawn)),
                         name_of);

}  // namespace
}  // namespace fovea
