// SPDX-License-Identifier: Apache-2.0
// Requests that an engine refuses, and cancelled requests.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/small_engine.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

TEST(EngineRequests, FieldsOutOfRangeAreNamed) {
  Engine& engine = shared_engine();
  const float nan = std::nanf(""), infinity = std::numeric_limits<float>::infinity();
  const auto refused = [&](const std::string& field,
                           const std::function<void(GenerateRequest&)>& change) {
    GenerateRequest request = text_request(kPrompt, 4);
    change(request);
    test::expect_invalid(field, [&] { engine.add(request); });
    EXPECT_TRUE(engine.idle());
  };
  for (const int32_t value : {-1, 0, std::numeric_limits<int32_t>::min()})
    refused("max_new_tokens", [&](auto& r) { r.sampling.max_new_tokens = value; });
  for (const float value : {-1.0f, nan, infinity, 1e38f, 101.0f})
    refused("temperature", [&](auto& r) { r.sampling.temperature = value; });
  for (const int32_t value : {-1, std::numeric_limits<int32_t>::min()})
    refused("top_k", [&](auto& r) { r.sampling.top_k = value; });
  for (const float value : {-1.0f, 0.0f, 1.01f, nan, infinity})
    refused("top_p", [&](auto& r) { r.sampling.top_p = value; });
  for (const float value : {-0.1f, 1.1f, nan})
    refused("min_p", [&](auto& r) { r.sampling.min_p = value; });
  for (const int32_t value : {-2, 21, std::numeric_limits<int32_t>::max()})
    refused("logprobs", [&](auto& r) { r.sampling.logprobs = value; });
  refused("stop", [](auto& r) { r.sampling.stop = {""}; });
  refused("stop", [](auto& r) { r.sampling.stop = {std::string(5000, 'x')}; });
  refused("stop", [](auto& r) { r.sampling.stop = {"\xff"}; });
  refused("stop", [](auto& r) { r.sampling.stop.assign(1000, "x"); });
  refused("stop_tokens", [](auto& r) { r.sampling.stop_tokens = {-1}; });
  refused("stop_tokens", [](auto& r) { r.sampling.stop_tokens = {2048}; });
  refused("token 1 is 2048", [](auto& r) { r.tokens = {5, 2048}; });
  refused("token 0 is -1", [](auto& r) { r.tokens = {-1}; });
  refused("0 tokens", [](auto& r) { r.prompt.clear(); });
}

TEST(EngineRequests, LargestFieldsAreServed) {
  Engine& engine = shared_engine();
  GenerateRequest request = text_request(kPrompt, std::numeric_limits<int32_t>::max());
  request.sampling.temperature = 100;
  request.sampling.top_k = std::numeric_limits<int32_t>::max();
  request.sampling.seed = std::numeric_limits<uint64_t>::max();
  const GenerateResult result = engine.generate({&request, 1}).front();
  EXPECT_EQ(result.finish, FinishReason::length);
  EXPECT_EQ(result.prompt_tokens + static_cast<int32_t>(result.tokens.size()),
            engine.max_context());
}

TEST(EngineRequests, PromptsThatDoNotFitNameBothLengths) {
  Engine& engine = shared_engine();
  GenerateRequest request = text_request("", 1);
  request.tokens.assign(256, 7);
  test::expect_error(ErrorCode::invalid_argument, {"256 tokens", "context of 256"},
                     [&] { engine.add(request); });
  request.tokens.assign(255, 7);
  EXPECT_EQ(engine.generate({&request, 1}).front().tokens.size(), 1u);
  test::expect_error(ErrorCode::invalid_argument, {"257", "256"},
                     [&] { (void)engine.logits(std::vector<int32_t>(257, 7)); });
  EXPECT_TRUE(engine.logits({}).empty());
}

TEST(EngineRequests, GenerateAddsAllOrNothing) {
  Engine& engine = shared_engine();
  std::vector<GenerateRequest> requests(3, text_request(kPrompt, 4));
  requests[2].sampling.top_p = 2;
  EXPECT_THROW((void)engine.generate(requests), Error);
  EXPECT_TRUE(engine.idle());
  EXPECT_THROW((void)engine.generate({requests.data(), 2},
                                     [](const TokenEvent&) { throw std::runtime_error("stop"); }),
               std::runtime_error);
  EXPECT_TRUE(engine.idle());
  expect_no_leak(engine);
}

TEST(EngineRequests, GenerateKeepsEventsOfOtherRequests) {
  Engine& engine = shared_engine();
  const int64_t other = engine.add(text_request(kPrompt, 3));
  const GenerateRequest request = text_request(kPrompt, 8);
  EXPECT_EQ(engine.generate({&request, 1}).front().tokens.size(), 8u);
  int tokens = 0;
  while (!engine.idle())
    for (const TokenEvent& event : engine.step()) {
      EXPECT_EQ(event.request, other);
      ++tokens;
    }
  EXPECT_EQ(tokens, 3);
}

TEST(EngineRequests, GenerateKeepsEventsOfOtherRequestsWhenItsCallbackThrows) {
  Engine& engine = shared_engine();
  const GenerateRequest request = text_request(kPrompt, 8);
  int64_t other = 0;
  int calls = 0;
  const auto on_token = [&](const TokenEvent&) {
    if (other == 0) other = engine.add(text_request(kPrompt, 6));
    if (++calls == 4) throw std::runtime_error("stop");
  };
  EXPECT_THROW((void)engine.generate({&request, 1}, on_token), std::runtime_error);
  int tokens = 0;
  while (!engine.idle())
    for (const TokenEvent& event : engine.step()) {
      EXPECT_EQ(event.request, other);
      ++tokens;
    }
  EXPECT_EQ(tokens, 6);
}

TEST(EngineRequests, ACallbackThatStepsIsAnError) {
  Engine& engine = shared_engine();
  const GenerateRequest request = text_request(kPrompt, 4);
  const auto on_token = [&](const TokenEvent&) {
    while (!engine.idle()) (void)engine.step();
  };
  test::expect_error(ErrorCode::invalid_argument, {"step()", "on_token"}, [&] {
    (void)engine.generate({&request, 1}, on_token);
  });
  expect_no_leak(engine);
}

TEST(EngineRequests, CancelFreesAtEveryState) {
  const std::unique_ptr<Engine> engine = Engine::load(small_options());
  engine->cancel(1);
  engine->cancel(-7);
  for (int steps = 0; steps < 8; ++steps) {
    GenerateRequest request = text_request("", 50);
    request.tokens.assign(150, 9);  // three chunks
    const int64_t id = engine->add(request);
    int produced = 0;
    for (int i = 0; i < steps; ++i)
      for (const TokenEvent& event : engine->step()) produced += event.token >= 0;
    engine->cancel(id);
    engine->cancel(id);
    EXPECT_FALSE(engine->idle()) << "its last event is due";
    const std::vector<TokenEvent> events = engine->step();
    ASSERT_EQ(events.size(), 1u);
    EXPECT_EQ(events[0].request, id);
    EXPECT_EQ(events[0].token, -1);
    EXPECT_EQ(events[0].finish, FinishReason::cancelled);
    expect_no_leak(*engine);
  }
}

TEST(EngineRequests, MayBeCancelledFromTheCallback) {
  Engine& engine = shared_engine();
  std::vector<GenerateRequest> requests(2, text_request(kPrompt, 20));
  int64_t first = 0;
  int tokens = 0;
  const std::vector<GenerateResult> results =
      engine.generate(requests, [&](const TokenEvent& event) {
        if (first == 0) first = event.request;
        if (event.request == first && event.token >= 0 && ++tokens == 5) engine.cancel(first);
      });
  EXPECT_EQ(results[0].finish, FinishReason::cancelled);
  EXPECT_EQ(results[0].tokens.size(), 5u);
  EXPECT_EQ(results[1].finish, FinishReason::length);
  EXPECT_EQ(results[1].tokens.size(), 20u);
  expect_no_leak(engine);
}

TEST(EngineRequests, CancelHandsOutTheTextThatWasHeldBack) {
  Engine& engine = shared_engine();
  GenerateRequest request = text_request(kPrompt, 20);
  const std::string text = engine.generate({&request, 1}).front().text;
  request.sampling.stop = {text + "and what never comes"};
  int tokens = 0;
  std::string streamed;
  const GenerateResult result = engine
                                    .generate({&request, 1},
                                              [&](const TokenEvent& event) {
                                                streamed += event.text;
                                                EXPECT_TRUE(++tokens > 4 || streamed.empty())
                                                    << streamed;
                                                if (tokens == 5) engine.cancel(event.request);
                                              })
                                    .front();
  EXPECT_EQ(result.finish, FinishReason::cancelled);
  EXPECT_EQ(result.tokens.size(), 5u);
  EXPECT_EQ(result.text, engine.decode(result.tokens));
  EXPECT_EQ(streamed, result.text);
}

// Only some of the requests run at once: the last ones have not begun.
TEST(EngineRequests, GenerateStopsWhenAsked) {
  const std::unique_ptr<Engine> engine = Engine::load(small_options());
  std::vector<GenerateRequest> requests(6, text_request(kPrompt, 20));
  requests[0].sampling.prompt_logprobs = true;
  int steps = 0;
  const auto results = engine->generate(requests, {}, [&] { return ++steps > 6; });
  for (const GenerateResult& result : results) {
    EXPECT_EQ(result.finish, FinishReason::cancelled);
    EXPECT_EQ(result.text, engine->decode(result.tokens));
    EXPECT_EQ(result.prompt_tokens, static_cast<int32_t>(engine->encode(kPrompt).size()));
  }
  EXPECT_GT(results[0].tokens.size(), 0u);
  EXPECT_EQ(results[0].prompt_logprobs.size(), static_cast<size_t>(results[0].prompt_tokens));
  EXPECT_EQ(results[5].tokens.size(), 0u);
  expect_no_leak(*engine);
  const auto none = engine->generate({requests.data(), 1}, {}, [] { return true; });
  EXPECT_EQ(none[0].finish, FinishReason::cancelled);
  EXPECT_TRUE(none[0].prompt_logprobs.empty());
}

}  // namespace
}  // namespace fovea
