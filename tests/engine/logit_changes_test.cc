// SPDX-License-Identifier: Apache-2.0
#include "engine/logit_changes.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "engine/sampler.h"
#include "engine/small_engine.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();

struct Case {
  std::string name;
  std::function<void(SamplingParams&)> change;
  std::vector<float> expected;
};

// Logits {1, -1, 2, 0, 3}; the prompt is {0, 1, 1}, the output {1, 2, 2}, the end token 4.
const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"bias",
       [](auto& p) {
         p.logit_bias = {{3, 5}, {4, -100}};
       },
       {1, -1, 2, 5, -97}},
      {"biases of one token add up",
       [](auto& p) {
         p.logit_bias = {{3, 5}, {3, 1}};
       },
       {1, -1, 2, 6, 3}},
      {"repetition", [](auto& p) { p.repetition_penalty = 2; }, {0.5, -2, 1, 0, 3}},
      {"frequency counts the output",
       [](auto& p) { p.frequency_penalty = 0.5; },
       {1, -1.5, 1, 0, 3}},
      {"presence", [](auto& p) { p.presence_penalty = -1; }, {1, 0, 3, 0, 3}},
      {"all penalties",
       [](auto& p) {
         p.repetition_penalty = 2;
         p.frequency_penalty = 0.5;
         p.presence_penalty = 1;
         p.logit_bias = {{2, 2}};
       },
       {0.5, -3.5, 0, 0, 3}},
      {"min_tokens reached",
       [](auto& p) { p.min_tokens = 3, p.presence_penalty = -1; },
       {1, 0, 3, 0, 3}},
      {"min_tokens",
       [](auto& p) { p.min_tokens = 4, p.stop_tokens = {0}; },
       {kForbidden, -1, 2, 0, kForbidden}},
      {"min_tokens without ends",
       [](auto& p) { p.min_tokens = 4, p.ignore_eos = true; },
       {1, -1, 2, 0, 3}}};
  return all;
}

TEST(LogitChanges, EachFieldChangesItsTokens) {
  const std::vector<float> logits = {1, -1, 2, 0, 3};
  const std::vector<int32_t> prompt = {0, 1, 1}, output = {1, 2, 2}, ends = {4};
  LogitChanges changes(5);
  for (const Case& one : cases()) {
    SamplingParams params;
    one.change(params);
    EXPECT_TRUE(changes_logits(params, 3)) << one.name;
    const auto changed = changes.apply(logits, params, {prompt, output, ends});
    EXPECT_EQ(std::vector<float>(changed.begin(), changed.end()), one.expected) << one.name;
  }
  EXPECT_FALSE(changes_logits({}, 0));
}

TEST(LogitChanges, LogprobsAreThoseOfTheUnchangedLogits) {
  const std::vector<float> logits = {1, 2, 0};
  Sampler sampler(3);
  SamplingParams params;
  params.logprobs = 2;
  params.logit_bias = {{2, 50}};
  const SampledToken sampled = sampler.sample(logits, params, TokenHistory{});
  EXPECT_EQ(sampled.token, 2);
  EXPECT_NEAR(sampled.logprob, -std::log(1 + std::exp(1) + std::exp(2)), 1e-6);
  ASSERT_EQ(sampled.top.size(), 2u);
  EXPECT_EQ(sampled.top[0].token, 1);
}

TEST(LogitChanges, FieldsOutOfRangeAreNamed) {
  const auto refused = [&](const std::string& field,
                           const std::function<void(SamplingParams&)>& change) {
    GenerateRequest request = text_request(kPrompt, 4);
    change(request.sampling);
    test::expect_invalid(field, [&] { shared_engine().add(request); });
    test::expect_invalid(field, [&] { shared_engine().check(request); });
  };
  const float nan = std::nanf("");
  for (const float value : {-2.1f, 2.1f, nan, 1e38f}) {
    refused("frequency_penalty", [&](auto& p) { p.frequency_penalty = value; });
    refused("presence_penalty", [&](auto& p) { p.presence_penalty = value; });
  }
  for (const float value : {0.0f, -1.0f, 101.0f, nan})
    refused("repetition_penalty", [&](auto& p) { p.repetition_penalty = value; });
  for (const int32_t value : {-1, 5}) refused("min_tokens", [&](auto& p) { p.min_tokens = value; });
  for (const int32_t value : {-1, 2048})
    refused("logit_bias", [&](auto& p) { p.logit_bias = {{value, 1}}; });
  for (const float value : {-101.0f, 101.0f, nan})
    refused("logit_bias", [&](auto& p) { p.logit_bias = {{1, value}}; });
  refused("logit_bias", [](auto& p) { p.logit_bias.resize(1025); });
}

TEST(LogitChanges, RequestsInOneBatchKeepTheirOwn) {
  Engine& engine = shared_engine();
  std::vector<GenerateRequest> requests(3, text_request(kPrompt, 12));
  requests[1].sampling.logit_bias = {{7, 100}};
  requests[2].sampling.presence_penalty = 2;
  requests[2].sampling.repetition_penalty = 100;
  const auto results = engine.generate(requests);
  EXPECT_EQ(results[0].tokens, engine.generate({requests.data(), 1}).front().tokens);
  EXPECT_EQ(results[1].tokens, std::vector<int32_t>(12, 7));
  std::vector<int32_t> distinct = results[2].tokens;
  std::ranges::sort(distinct);
  EXPECT_EQ(std::ranges::adjacent_find(distinct), distinct.end()) << "a token came twice";
}

TEST(LogitChanges, MinTokensDelaysTheEnd) {
  Engine& engine = shared_engine();
  GenerateRequest request = text_request(kPrompt, 8);
  request.sampling.stop_tokens = {engine.generate({&request, 1}).front().tokens[0]};
  EXPECT_EQ(engine.generate({&request, 1}).front().tokens.size(), 1u);
  request.sampling.min_tokens = 5;
  const GenerateResult result = engine.generate({&request, 1}).front();
  EXPECT_GE(result.tokens.size(), 6u);
}

TEST(PromptScores, NameTheLikeliestTokensAtEachPosition) {
  Engine& engine = shared_engine();
  GenerateRequest request = text_request(kPrompt, 1);
  request.sampling.logprobs = 3;
  request.sampling.prompt_logprobs = true;
  request.tokens = engine.encode(kPrompt);
  engine.add(request);
  TokenEvent last;
  while (!engine.idle())
    for (const TokenEvent& event : engine.step()) last = event;
  ASSERT_EQ(last.prompt_top.size(), request.tokens.size());
  EXPECT_TRUE(last.prompt_top[0].empty());
  const std::vector<float> logits = engine.logits(request.tokens);
  const auto vocabulary = static_cast<size_t>(engine.vocabulary());
  for (size_t i = 1; i < request.tokens.size(); ++i) {
    const auto row = std::span(logits).subspan((i - 1) * vocabulary, vocabulary);
    const auto& top = last.prompt_top[i];
    ASSERT_EQ(top.size(), 3u);
    const auto best = std::ranges::max_element(row) - row.begin();
    EXPECT_EQ(top[0].token, best);
    EXPECT_NEAR(top[0].logprob, Sampler::logprob(row, top[0].token), 1e-4);
    EXPECT_NEAR(last.prompt_logprobs[i], Sampler::logprob(row, request.tokens[i]), 1e-4);
  }
}

TEST(TokenBytes, JoinToTheText) {
  Engine& engine = shared_engine();
  std::string joined;
  const auto tokens = engine.encode_bare(kPrompt + " \xE2\x82\xAC");
  for (const int32_t token : tokens) joined += engine.token_bytes(token);
  EXPECT_EQ(joined, kPrompt + " \xE2\x82\xAC");
  EXPECT_EQ(engine.token_bytes(-1), "");
  EXPECT_EQ(engine.token_bytes(1 << 30), "");
}

}  // namespace
}  // namespace fovea
