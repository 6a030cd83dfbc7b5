// SPDX-License-Identifier: Apache-2.0
// The engine of C gives the tokens, events and texts of the engine of C++.
#include "fovea/engine.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "c/through_c.h"
#include "support/chat_model.h"

namespace fovea::test {
namespace {

const std::string kModel = FOVEA_SOURCE_DIR "/testdata/models/llama";

fovea_engine* load() {
  fovea_engine_options options;
  check_status(fovea_engine_options_init(&options, sizeof options));
  options.model_path = kModel.c_str();
  options.threads = 1;
  options.max_context = 256;
  options.kv_memory_bytes = 16 << 20;
  fovea_engine* engine = nullptr;
  check_status(fovea_engine_load(&options, &engine));
  return engine;
}

EngineOptions same_options() {
  return {.model_path = kModel, .kv_memory_bytes = 16 << 20, .max_context = 256, .threads = 1};
}

const GenerateRequest kRequest{.prompt = "Once upon a time",
                               .sampling = {.max_new_tokens = 12, .logprobs = 2}};

// The same request, in C.
struct CRequest {
  CRequest() {
    check_status(fovea_sampling_params_init(&sampling, sizeof sampling));
    check_status(fovea_generate_request_init(&request, sizeof request));
    sampling.max_new_tokens = 12;
    sampling.logprobs = 2;
    request.prompt = kRequest.prompt.c_str();
    request.sampling = &sampling;
  }
  fovea_sampling_params sampling;
  fovea_generate_request request;
};

struct Received {
  std::vector<int32_t> tokens;
  std::string text;
  int32_t finish = FOVEA_FINISH_NONE;
  int32_t cancel_after = -1;
  fovea_engine* engine = nullptr;
  fovea_status nested = FOVEA_OK;
};

int32_t receive(void* user, const fovea_token_event* event) {
  auto& received = *static_cast<Received*>(user);
  if (event->token >= 0) received.tokens.push_back(event->token);
  received.text.append(event->text, event->text_bytes);
  if (event->finish != FOVEA_FINISH_NONE) received.finish = event->finish;
  if (received.engine != nullptr) {
    received.nested = fovea_engine_step(received.engine, nullptr, nullptr);
  }
  return received.cancel_after >= 0 &&
                 static_cast<int32_t>(received.tokens.size()) >= received.cancel_after
             ? 1
             : 0;
}

TEST(EngineInC, GenerateGivesTheSameTokensAndEvents) {
  const auto expected_engine = Engine::load(same_options());
  const GenerateResult expected = expected_engine->generate({&kRequest, 1}).front();
  fovea_engine* const engine = load();
  const CRequest given;
  const fovea_generate_request* const requests[] = {&given.request};
  Received received;
  received.engine = engine;
  fovea_generation generation;
  ASSERT_EQ(fovea_generation_init(&generation, sizeof generation), FOVEA_OK);
  generation.requests = requests;
  generation.count = 1;
  generation.on_event = receive;
  generation.user = &received;
  fovea_results* results = nullptr;
  ASSERT_EQ(fovea_engine_generate(engine, &generation, &results), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(received.nested, FOVEA_INVALID_ARGUMENT);
  size_t count = 0;
  ASSERT_EQ(fovea_results_count(results, &count), FOVEA_OK);
  ASSERT_EQ(count, 1u);
  fovea_result result;
  ASSERT_EQ(fovea_result_init(&result, sizeof result), FOVEA_OK);
  ASSERT_EQ(fovea_results_get(results, 0, &result), FOVEA_OK);
  EXPECT_EQ(std::vector<int32_t>(result.tokens, result.tokens + result.token_count),
            expected.tokens);
  EXPECT_EQ(std::string(result.text, result.text_bytes), expected.text);
  EXPECT_EQ(result.finish, static_cast<int32_t>(expected.finish));
  EXPECT_EQ(result.prompt_tokens, expected.prompt_tokens);
  EXPECT_EQ(std::vector<float>(result.logprobs, result.logprobs + result.logprob_count),
            expected.logprobs);
  fovea_token_logprob top[2];
  count = 2;
  ASSERT_EQ(fovea_results_top(results, 0, 3, top, &count), FOVEA_OK);
  ASSERT_EQ(count, 2u);
  EXPECT_EQ(top[1].token, expected.top[3][1].token);
  EXPECT_EQ(top[1].logprob, expected.top[3][1].logprob);
  EXPECT_EQ(received.tokens, expected.tokens);
  EXPECT_EQ(received.text, expected.text);
  EXPECT_EQ(received.finish, result.finish);
  EXPECT_EQ(fovea_results_destroy(results), FOVEA_OK);
  EXPECT_EQ(fovea_engine_destroy(engine), FOVEA_OK);
}

TEST(EngineInC, StepsAndCancellation) {
  fovea_engine* const engine = load();
  const CRequest given;
  int64_t id = 0;
  ASSERT_EQ(fovea_engine_add(engine, &given.request, &id), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(id, 1);
  Received received;
  received.cancel_after = 3;
  int32_t idle = 0;
  while (idle == 0) {
    ASSERT_EQ(fovea_engine_step(engine, receive, &received), FOVEA_OK) << fovea_last_error();
    ASSERT_EQ(fovea_engine_idle(engine, &idle), FOVEA_OK);
    ASSERT_LT(received.tokens.size(), 12u);
  }
  EXPECT_EQ(received.tokens.size(), 3u);
  EXPECT_EQ(received.finish, FOVEA_FINISH_CANCELLED);
  fovea_generate_request wrong = given.request;
  const int32_t tokens[] = {-5};
  wrong.tokens = tokens;
  wrong.token_count = 1;
  EXPECT_EQ(fovea_engine_add(engine, &wrong, &id), FOVEA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(fovea_last_error()).find("-5"), std::string::npos) << fovea_last_error();
  EXPECT_EQ(fovea_engine_cancel(engine, 77), FOVEA_OK);
  EXPECT_EQ(fovea_engine_clear_prefix_cache(engine), FOVEA_OK);
  EXPECT_EQ(fovea_engine_destroy(engine), FOVEA_OK);
}

TEST(EngineInC, SamplingHasEveryField) {
  const auto expected = Engine::load(same_options());
  const std::string schema = R"({"type": "object", "properties": {"a": {"type": "integer"}}})";
  const GenerateRequest wanted{.prompt = kRequest.prompt,
                               .sampling = {.max_new_tokens = 24,
                                            .logit_bias = {{5, 1.5f}, {9, -100}},
                                            .repetition_penalty = 1.5f,
                                            .frequency_penalty = 0.5f,
                                            .presence_penalty = 0.25f,
                                            .min_tokens = 3,
                                            .json_schema = schema}};
  const GenerateResult result = expected->generate({&wanted, 1}, {}, {}).at(0);
  EXPECT_TRUE(result.text.starts_with('{')) << result.text;
  fovea_engine* const engine = load();
  CRequest request;
  const fovea_token_bias biases[] = {{5, 1.5f}, {9, -100}};
  request.sampling.max_new_tokens = 24;
  request.sampling.logprobs = -1;
  request.sampling.logit_bias = biases;
  request.sampling.logit_bias_count = 2;
  request.sampling.repetition_penalty = 1.5f;
  request.sampling.frequency_penalty = 0.5f;
  request.sampling.presence_penalty = 0.25f;
  request.sampling.min_tokens = 3;
  request.sampling.json_schema = schema.c_str();
  Received received;
  int64_t id = 0;
  ASSERT_EQ(fovea_engine_add(engine, &request.request, &id), FOVEA_OK) << fovea_last_error();
  while (received.finish == FOVEA_FINISH_NONE)
    ASSERT_EQ(fovea_engine_step(engine, receive, &received), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(received.tokens, result.tokens);
  EXPECT_EQ(received.text, result.text);
  request.sampling.json_schema = R"({"type": "frog"})";
  EXPECT_EQ(fovea_engine_add(engine, &request.request, &id), FOVEA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(fovea_last_error()).find("frog"), std::string::npos) << fovea_last_error();
  request.sampling.json_schema = nullptr;
  request.sampling.logit_bias = nullptr;
  EXPECT_EQ(fovea_engine_add(engine, &request.request, &id), FOVEA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(fovea_last_error()).find("logit_bias"), std::string::npos);
  EXPECT_EQ(fovea_engine_destroy(engine), FOVEA_OK);
}

TEST(EngineInC, ConversationsFollowTheTemplate) {
  const ChatModel model("qwen2_5");
  EngineOptions options = same_options();
  options.model_path = model.folder();
  const auto expected = Engine::load(options);
  fovea_engine_options given;
  check_status(fovea_engine_options_init(&given, sizeof given));
  given.model_path = options.model_path.c_str();
  given.kv_memory_bytes = options.kv_memory_bytes;
  given.max_context = options.max_context;
  given.threads = 1;
  fovea_engine* engine = nullptr;
  check_status(fovea_engine_load(&given, &engine));
  const Conversation whole{.messages = R"([{"role": "user", "content": "Weather?"}])",
                           .tools = R"([{"type": "function", "function": {"name": "weather"}}])",
                           .variables = R"({"x": 1})"};
  const Conversation continued{.messages = R"([{"role": "assistant", "content": "1, 2,"}])",
                               .add_generation_prompt = false,
                               .continue_last_message = true};
  for (const Conversation& conversation : {whole, continued}) {
    fovea_conversation in_c;
    check_status(fovea_conversation_init(&in_c, sizeof in_c));
    in_c.messages = conversation.messages.c_str();
    if (!conversation.tools.empty()) in_c.tools = conversation.tools.c_str();
    if (!conversation.variables.empty()) in_c.variables = conversation.variables.c_str();
    in_c.add_generation_prompt = conversation.add_generation_prompt ? 1 : 0;
    in_c.continue_last_message = conversation.continue_last_message ? 1 : 0;
    size_t count = 0;
    ASSERT_EQ(fovea_engine_encode_conversation(engine, &in_c, nullptr, &count), FOVEA_OK)
        << fovea_last_error();
    std::vector<int32_t> tokens(count);
    ASSERT_EQ(fovea_engine_encode_conversation(engine, &in_c, tokens.data(), &count), FOVEA_OK);
    EXPECT_EQ(tokens, expected->encode_conversation(conversation));
    in_c.messages = nullptr;
    EXPECT_EQ(fovea_engine_encode_conversation(engine, &in_c, nullptr, &count),
              FOVEA_INVALID_ARGUMENT);
    in_c.messages = "[1]";
    EXPECT_EQ(fovea_engine_encode_conversation(engine, &in_c, nullptr, &count),
              FOVEA_INVALID_ARGUMENT);
    EXPECT_NE(std::string(fovea_last_error()).find("messages[0]"), std::string::npos);
  }
  EXPECT_EQ(fovea_engine_destroy(engine), FOVEA_OK);
}

TEST(EngineInC, TextLogitsAndDescriptions) {
  const auto expected = Engine::load(same_options());
  fovea_engine* const engine = load();
  const std::vector<int32_t> wanted = expected->encode("Hello, world");
  size_t count = 0;
  ASSERT_EQ(fovea_engine_encode(engine, "Hello, world", nullptr, &count), FOVEA_OK);
  std::vector<int32_t> tokens(count);
  ASSERT_EQ(fovea_engine_encode(engine, "Hello, world", tokens.data(), &count), FOVEA_OK);
  EXPECT_EQ(tokens, wanted);
  size_t bytes = 0;
  ASSERT_EQ(fovea_engine_decode(engine, tokens.data(), count, nullptr, &bytes), FOVEA_OK);
  std::string text(bytes, '?');
  ASSERT_EQ(fovea_engine_decode(engine, tokens.data(), count, text.data(), &bytes), FOVEA_OK);
  text.pop_back();
  EXPECT_EQ(text, expected->decode(tokens));
  size_t size = 0;
  ASSERT_EQ(fovea_engine_logits(engine, tokens.data(), count, nullptr, &size), FOVEA_OK);
  std::vector<float> logits(size);
  ASSERT_EQ(fovea_engine_logits(engine, tokens.data(), count, logits.data(), &size), FOVEA_OK);
  EXPECT_EQ(logits, expected->logits(tokens));
  ASSERT_EQ(fovea_engine_explain(engine, nullptr, &bytes), FOVEA_OK);
  text.assign(bytes, '?');
  ASSERT_EQ(fovea_engine_explain(engine, text.data(), &bytes), FOVEA_OK);
  text.pop_back();
  EXPECT_EQ(text, expected->explain());
  fovea_engine_stats stats;
  ASSERT_EQ(fovea_engine_stats_init(&stats, sizeof stats), FOVEA_OK);
  ASSERT_EQ(fovea_engine_get_stats(engine, &stats), FOVEA_OK);
  EXPECT_EQ(stats.vocabulary, expected->vocabulary());
  EXPECT_EQ(stats.max_context, 256);
  EXPECT_EQ(stats.memory_bytes, expected->stats().memory.total());
  fovea_selection* selection = nullptr;
  ASSERT_EQ(fovea_engine_selection(engine, 0, 0, &selection), FOVEA_OK);
  EXPECT_EQ(fovea_selection_destroy(selection), FOVEA_OK);
  EXPECT_EQ(fovea_engine_selection(engine, 9, 0, &selection), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(fovea_engine_notes(engine, nullptr, &bytes), FOVEA_OK);
  EXPECT_EQ(fovea_engine_destroy(engine), FOVEA_OK);
}

TEST(EngineInC, SpeculatesAndCountsDrafts) {
  fovea_engine_options options;
  ASSERT_EQ(fovea_engine_options_init(&options, sizeof options), FOVEA_OK);
  EXPECT_EQ(options.speculate, nullptr);
  EXPECT_EQ(options.max_drafts, EngineOptions{}.max_drafts);
  EXPECT_EQ(options.draft_branches, EngineOptions{}.draft_branches);
  options.model_path = kModel.c_str();
  options.threads = 1;
  options.max_context = 256;
  options.kv_memory_bytes = 16 << 20;
  const std::string speculate = "draft:" + kModel;
  options.speculate = speculate.c_str();
  options.max_drafts = 3;
  options.draft_branches = 2;
  options.always_speculate = 1;
  fovea_engine* engine = nullptr;
  ASSERT_EQ(fovea_engine_load(&options, &engine), FOVEA_OK) << fovea_last_error();
  const CRequest given;
  int64_t id = 0;
  ASSERT_EQ(fovea_engine_add(engine, &given.request, &id), FOVEA_OK) << fovea_last_error();
  int32_t steps = 0, idle = 0;
  for (; idle == 0; ++steps) {
    ASSERT_EQ(fovea_engine_step(engine, nullptr, nullptr), FOVEA_OK) << fovea_last_error();
    ASSERT_EQ(fovea_engine_idle(engine, &idle), FOVEA_OK);
  }
  EXPECT_LT(steps, 12) << "as many as tokens";
  fovea_engine_stats stats;
  ASSERT_EQ(fovea_engine_stats_init(&stats, sizeof stats), FOVEA_OK);
  ASSERT_EQ(fovea_engine_get_stats(engine, &stats), FOVEA_OK);
  EXPECT_EQ(stats.draft_steps, stats.draft_requests);
  EXPECT_GT(stats.draft_steps, 0);
  EXPECT_LE(stats.drafts, 3 * stats.draft_steps);
  EXPECT_GT(stats.accepted_drafts, 0);
  EXPECT_EQ(fovea_engine_destroy(engine), FOVEA_OK);
  options.always_speculate = 7;
  EXPECT_EQ(fovea_engine_load(&options, &engine), FOVEA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(fovea_last_error()).find("always_speculate"), std::string::npos);
}

TEST(EngineInC, PlanDescribesWithoutReading) {
  fovea_engine_options options;
  ASSERT_EQ(fovea_engine_options_init(&options, sizeof options), FOVEA_OK);
  options.model_path = kModel.c_str();
  options.threads = 1;
  options.max_context = 256;
  options.kv_memory_bytes = 16 << 20;
  size_t bytes = 0;
  ASSERT_EQ(fovea_engine_plan(&options, nullptr, nullptr, &bytes), FOVEA_OK) << fovea_last_error();
  std::string text(bytes, '?');
  ASSERT_EQ(fovea_engine_plan(&options, nullptr, text.data(), &bytes), FOVEA_OK);
  text.pop_back();
  EXPECT_EQ(text, Engine::plan(same_options()).explain());
}

}  // namespace
}  // namespace fovea::test
