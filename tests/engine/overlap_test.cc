// SPDX-License-Identifier: Apache-2.0
// Passes that are enqueued before the tokens of the pass before are known: when they are, what they
// waste, and what may happen in between. The churn tests compare their text.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "engine/small_engine.h"
#include "fovea/engine.h"

namespace fovea {
namespace {

std::unique_ptr<Engine> engine_with(bool overlap) {
  EngineOptions options = small_options();
  options.overlap = overlap;
  options.record_steps = true;
  return Engine::load(options);
}

TEST(Overlap, TheNextPassIsEnqueuedBeforeTheHostWaits) {
  const std::unique_ptr<Engine> engine = engine_with(true);
  const GenerateRequest request = text_request(kPrompt, 10);
  (void)engine->generate({&request, 1});
  EXPECT_EQ(engine->stats().steps, 10);
  EXPECT_EQ(engine->stats().overlapped_steps, 9);
  const std::vector<StepRecord> records = engine->take_step_records();
  ASSERT_EQ(records.size(), 10u);
  EXPECT_TRUE(engine->take_step_records().empty());
  for (size_t i = 0; i < records.size(); ++i) {
    const StepRecord& record = records[i];
    EXPECT_EQ(record.step, static_cast<int64_t>(i));
    EXPECT_EQ(record.overlapped, i > 0);
    EXPECT_EQ(record.decodes, i > 0 ? 1 : 0);
    EXPECT_EQ(record.requests, 1);
    const double times[] = {record.schedule_begin, record.enqueue_begin, record.enqueue_end,
                            record.wait_begin,     record.wait_end,      record.deliver_end};
    EXPECT_TRUE(std::ranges::is_sorted(times));
    EXPECT_LT(record.device_begin, record.device_end);
    if (i + 1 < records.size()) {
      EXPECT_LE(records[i + 1].enqueue_end, record.wait_begin);
    }
  }
}

TEST(Overlap, PassesWithoutItWaitForEachOther) {
  const std::unique_ptr<Engine> engine = engine_with(false);
  const GenerateRequest request = text_request(kPrompt, 10);
  (void)engine->generate({&request, 1});
  EXPECT_EQ(engine->stats().steps, 10);
  EXPECT_EQ(engine->stats().overlapped_steps, 0);
  const std::vector<StepRecord> records = engine->take_step_records();
  for (size_t i = 1; i < records.size(); ++i) {
    EXPECT_LE(records[i - 1].deliver_end, records[i].schedule_begin);
  }
}

// A length is known in advance. A token or a text that ends a request is not: its request has
// computed one more token, which no event brings.
TEST(Overlap, WastesAtMostOneToken) {
  const std::unique_ptr<Engine> engine = engine_with(true);
  GenerateRequest request = text_request(kPrompt, 12);
  const GenerateResult whole = engine->generate({&request, 1}).front();
  ASSERT_EQ(whole.tokens.size(), 12u);
  const int64_t steps = engine->stats().steps;
  EXPECT_EQ(steps, 12);

  const int32_t last = whole.tokens[7];
  const auto first = std::ranges::find(whole.tokens, last) - whole.tokens.begin();
  request.sampling.stop_tokens = {last};
  const GenerateResult stopped = engine->generate({&request, 1}).front();
  EXPECT_EQ(stopped.finish, FinishReason::stop);
  EXPECT_EQ(stopped.tokens.size(), static_cast<size_t>(first) + 1);
  EXPECT_TRUE(engine->idle());
  EXPECT_EQ(engine->stats().steps - steps, first + 1);  // the wasted pass is still in flight
  EXPECT_TRUE(engine->step().empty());
  EXPECT_EQ(engine->stats().steps - steps, first + 2);
  EXPECT_TRUE(engine->step().empty());
  EXPECT_EQ(engine->stats().steps - steps, first + 2);

  request.sampling.stop_tokens = {};
  EXPECT_EQ(engine->generate({&request, 1}).front().tokens, whole.tokens);
  expect_no_leak(*engine);
}

// The last request that ended is not the only one that a pass in flight computes.
TEST(Overlap, RequestsEndWhileOthersGoOn) {
  const std::unique_ptr<Engine> alone = engine_with(false), engine = engine_with(true);
  std::vector<GenerateRequest> requests;
  for (int32_t i = 0; i < 6; ++i) requests.push_back(text_request(kPrompt, 5 + 3 * i));
  requests[4].sampling.temperature = 2;
  requests[4].sampling.logprobs = 1;  // its tokens are drawn by the host
  std::vector<GenerateResult> want = alone->generate(requests);
  requests[1].sampling.stop_tokens = {want[1].tokens[3]};
  requests[5].sampling.stop = {want[5].text.substr(want[5].text.size() / 2, 3)};
  want = alone->generate(requests);
  const std::vector<GenerateResult> got = engine->generate(requests);
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].tokens, want[i].tokens) << i;
    EXPECT_EQ(got[i].text, want[i].text) << i;
    EXPECT_EQ(got[i].finish, want[i].finish) << i;
  }
  EXPECT_GT(engine->stats().overlapped_steps, 0);
  EXPECT_LT(engine->stats().overlapped_steps, engine->stats().steps - 1);
  expect_no_leak(*engine);
}

// The host makes the mask of a schema while the pass that draws from it already runs.
TEST(Overlap, SchemasDoNotMakePassesWait) {
  const std::unique_ptr<Engine> alone = engine_with(false), engine = engine_with(true);
  std::vector<GenerateRequest> requests;
  for (int32_t i = 0; i < 6; ++i) {
    GenerateRequest& request = requests.emplace_back(text_request(kPrompt, 8 + 4 * i));
    request.sampling.temperature = i == 0 ? 0.0f : 2.0f;
    request.sampling.seed = static_cast<uint64_t>(i);
    request.sampling.ignore_eos = i % 2 == 1;
    if (i == 2) continue;  // no schema
    request.sampling.json_schema =
        i < 4 ? R"({"type":"array","items":{"enum":["red","green",17]}})"
              : R"({"type":"object","properties":{"a":{"type":"integer","maximum":99}},)"
                R"("required":["a"],"additionalProperties":false})";
  }
  const std::vector<GenerateResult> want = alone->generate(requests);
  const std::vector<GenerateResult> got = engine->generate(requests);
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].tokens, want[i].tokens) << i;
    EXPECT_EQ(got[i].text, want[i].text) << i;
    EXPECT_EQ(got[i].finish, want[i].finish) << i << got[i].error;
  }
  EXPECT_EQ(got[5].finish, FinishReason::stop) << got[5].text;
  const GenerateResult single = engine->generate({requests.data() + 1, 1}).front();
  EXPECT_EQ(single.tokens, want[1].tokens);
  expect_no_leak(*engine);
  int64_t waited = 0;
  for (const StepRecord& record : engine->take_step_records()) {
    waited += !record.overlapped && record.decodes > 0;
  }
  EXPECT_EQ(waited, 0);
}

// A request that ends, or is cancelled, has a draw in the pass that already runs.
TEST(Overlap, SchemasSurviveCallsBetweenSteps) {
  const std::unique_ptr<Engine> engine = engine_with(true);
  GenerateRequest request = text_request(kPrompt, 20);
  request.sampling.json_schema = R"({"type":"array","items":{"enum":["red","green"]}})";
  request.sampling.ignore_eos = false;
  const GenerateResult whole = engine->generate({&request, 1}).front();
  const std::vector<float> logits = engine->logits(whole.tokens);
  const int64_t kept = engine->add(request), cancelled = engine->add(request);
  std::vector<int32_t> tokens;
  for (int steps = 0; !engine->idle(); ++steps) {
    if (steps == 3) engine->cancel(cancelled);
    if (steps == 5) {
      EXPECT_EQ(engine->logits(whole.tokens), logits);
    }
    for (const TokenEvent& event : engine->step()) {
      if (event.request == kept && event.token >= 0) tokens.push_back(event.token);
      EXPECT_NE(event.finish, FinishReason::failed) << event.error;
    }
  }
  EXPECT_EQ(tokens, whole.tokens);
  expect_no_leak(*engine);
}

TEST(Overlap, CallsBetweenStepsSeeNoTokenTwice) {
  const std::unique_ptr<Engine> engine = engine_with(true);
  const GenerateRequest request = text_request(kPrompt, 20);
  const GenerateResult whole = engine->generate({&request, 1}).front();
  const std::vector<float> logits = engine->logits(whole.tokens);
  const int64_t kept = engine->add(request), cancelled = engine->add(request);
  std::vector<int32_t> tokens;
  int ends = 0;
  for (int steps = 0; !engine->idle(); ++steps) {
    if (steps == 4) engine->cancel(cancelled);
    if (steps == 6) {
      EXPECT_EQ(engine->logits(whole.tokens), logits);
    }
    if (steps == 8) engine->clear_prefix_cache();
    for (const TokenEvent& event : engine->step()) {
      if (event.request == kept) tokens.push_back(event.token);
      if (event.finish == FinishReason::none) continue;
      ++ends;
      EXPECT_EQ(event.finish,
                event.request == kept ? FinishReason::length : FinishReason::cancelled);
    }
  }
  EXPECT_EQ(tokens, whole.tokens);
  EXPECT_EQ(ends, 2);
  expect_no_leak(*engine);
}

// A request that waits finds the prefix of one that the pass before has computed.
TEST(Overlap, FindsThePrefixesThatItFindsWithoutIt) {
  int64_t hits[2];
  for (const bool overlap : {false, true}) {
    EngineOptions options = small_options();
    options.overlap = overlap;
    options.max_batch_tokens = 40;  // prompts come one after another
    const std::unique_ptr<Engine> engine = Engine::load(options);
    std::string prompt;
    for (int i = 0; i < 4; ++i) prompt += kPrompt + " ";
    std::vector<GenerateRequest> requests(3, text_request(prompt, 4));
    const std::vector<GenerateResult> results = engine->generate(requests);
    EXPECT_EQ(results[2].tokens, results[0].tokens);
    hits[overlap] = engine->stats().prefix_hits;
  }
  EXPECT_GT(hits[0], 0);
  EXPECT_EQ(hits[1], hits[0]);
}

}  // namespace
}  // namespace fovea
