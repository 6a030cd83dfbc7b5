// SPDX-License-Identifier: Apache-2.0
#include "fovea/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "engine/reference_text.h"
#include "engine/tokenizer.h"
#include "fovea/error.h"

namespace fovea {
namespace {

EngineOptions small_options(const std::string& model = "llama") {
  EngineOptions options;
  options.model_path = model_folder(model);
  options.kv_memory_bytes = size_t{32} << 20;
  options.max_context = 256;
  options.max_requests = 4;
  options.max_batch_tokens = 64;
  options.threads = 1;
  return options;
}

GenerateRequest text_request(const std::string& prompt, int32_t new_tokens) {
  GenerateRequest request;
  request.prompt = prompt;
  request.sampling.max_new_tokens = new_tokens;
  request.sampling.ignore_eos = true;
  return request;
}

const std::string kPrompt = "And it came to pass in the days of";

void expect_error(const std::function<void()>& action, ErrorCode code,
                  const std::vector<std::string>& parts) {
  try {
    action();
    ADD_FAILURE() << "no error, expected one about " << parts.front();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    for (const std::string& part : parts)
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << "no \"" << part << "\" in: " << error.what();
  }
}

void expect_no_leak(Engine& engine) {
  EXPECT_TRUE(engine.idle());
  engine.clear_prefix_cache();
  EXPECT_EQ(engine.stats().kv_pages_free, engine.stats().kv_pages);
}

// One engine for the tests that only read from it.
Engine& shared_engine() {
  static const std::unique_ptr<Engine> engine = Engine::load(small_options());
  return *engine;
}

TEST(EngineText, RoundTripsAndStreamsWhatItReturns) {
  Engine& engine = shared_engine();
  EXPECT_EQ(engine.decode(engine.encode(kPrompt)), kPrompt);
  std::string streamed;
  const GenerateRequest request = text_request(kPrompt, 40);
  const GenerateResult result =
      engine.generate({&request, 1}, [&](const TokenEvent& event) { streamed += event.text; })
          .front();
  EXPECT_EQ(streamed, result.text);
  EXPECT_EQ(result.text, engine.decode(result.tokens));
  EXPECT_EQ(result.tokens.size(), 40u);
  EXPECT_EQ(result.finish, FinishReason::length);
}

TEST(EngineText, StopStringsEndTheTextBeforeThem) {
  Engine& engine = shared_engine();
  GenerateRequest request = text_request(kPrompt, 40);
  const std::string whole = engine.generate({&request, 1}).front().text;
  // A stop that begins and ends inside tokens.
  const std::string stop = whole.substr(whole.size() / 2, 9);
  request.sampling.stop = {"never in the text", stop};
  std::string streamed;
  const GenerateResult result = engine
                                    .generate({&request, 1},
                                              [&](const TokenEvent& event) {
                                                streamed += event.text;
                                                EXPECT_EQ(whole.find(streamed), 0u);
                                                EXPECT_EQ(streamed.find(stop), std::string::npos);
                                              })
                                    .front();
  EXPECT_EQ(result.finish, FinishReason::stop);
  EXPECT_EQ(result.text, whole.substr(0, whole.find(stop)));
  EXPECT_EQ(streamed, result.text);
}

TEST(EngineText, StopTokensEndTheTextWithoutTheirs) {
  Engine& engine = shared_engine();
  GenerateRequest request = text_request(kPrompt, 20);
  const GenerateResult whole = engine.generate({&request, 1}).front();
  request.sampling.stop_tokens = {whole.tokens[7]};
  const GenerateResult result = engine.generate({&request, 1}).front();
  EXPECT_EQ(result.finish, FinishReason::stop);
  ASSERT_FALSE(result.tokens.empty());
  EXPECT_EQ(result.tokens.back(), whole.tokens[7]);
  EXPECT_EQ(result.text, engine.decode({result.tokens.data(), result.tokens.size() - 1}));
}

// Sampling at a high temperature produces broken UTF-8 and partial characters.
TEST(EngineText, EventsHoldWholeCharacters) {
  Engine& engine = shared_engine();
  for (uint64_t seed = 0; seed < 20; ++seed) {
    GenerateRequest request = text_request(kPrompt, 60);
    request.sampling.temperature = 50;
    request.sampling.seed = seed;
    (void)engine.generate({&request, 1}, [](const TokenEvent& event) {
      Utf8Stream stream;
      EXPECT_EQ(stream.push(event.text), event.text);
      EXPECT_EQ(stream.finish(), "");
    });
  }
}

TEST(EngineText, SamplingDoesNotDependOnTheBatch) {
  const std::unique_ptr<Engine> engine = Engine::load(small_options());
  std::vector<GenerateRequest> requests;
  for (uint64_t seed = 0; seed < 6; ++seed) {
    requests.push_back(text_request(kPrompt, 24));
    requests.back().sampling.temperature = 0.8f;
    requests.back().sampling.top_p = 0.95f;
    requests.back().sampling.seed = seed;
  }
  const std::vector<GenerateResult> batched = engine->generate(requests);
  int different = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(engine->generate({&requests[i], 1}).front().tokens, batched[i].tokens) << i;
    different += batched[i].tokens != batched[0].tokens;
  }
  EXPECT_GT(different, 3);
}

TEST(EngineText, LogprobsAgreeWithTheLogits) {
  Engine& engine = shared_engine();
  GenerateRequest request = text_request(kPrompt, 5);
  request.sampling.logprobs = 3;
  request.sampling.prompt_logprobs = true;
  const GenerateResult result = engine.generate({&request, 1}).front();
  std::vector<int32_t> tokens = engine.encode(kPrompt);
  const size_t prompt = tokens.size();
  ASSERT_EQ(result.prompt_logprobs.size(), prompt);
  EXPECT_EQ(result.prompt_logprobs[0], 0);
  EXPECT_EQ(result.cached_tokens, 0);
  tokens.insert(tokens.end(), result.tokens.begin(), result.tokens.end());
  const std::vector<float> logits = engine.logits(tokens);
  const auto width = static_cast<size_t>(engine.vocabulary());
  ASSERT_EQ(result.logprobs.size(), 5u);
  for (size_t i = 1; i < tokens.size(); ++i) {
    const float* row = logits.data() + (i - 1) * width;
    double sum = 0;
    for (size_t j = 0; j < width; ++j) sum += std::exp(static_cast<double>(row[j]));
    const double expected = row[tokens[i]] - std::log(sum);
    const float got = i < prompt ? result.prompt_logprobs[i] : result.logprobs[i - prompt];
    EXPECT_NEAR(got, expected, 1e-4) << i;
    if (i >= prompt) {
      ASSERT_EQ(result.top[i - prompt].size(), 3u);
      EXPECT_EQ(result.top[i - prompt][0].token, tokens[i]) << "greedy takes the most likely";
    }
  }
}

TEST(EngineText, SaltsDoNotShare) {
  const std::unique_ptr<Engine> engine = Engine::load(small_options());
  GenerateRequest request = text_request(kPrompt + kPrompt + kPrompt, 2);
  request.salt = "tenant a";
  EXPECT_EQ(engine->generate({&request, 1}).front().cached_tokens, 0);
  EXPECT_GE(engine->generate({&request, 1}).front().cached_tokens, 16);
  request.salt = "tenant b";
  EXPECT_EQ(engine->generate({&request, 1}).front().cached_tokens, 0);
  expect_no_leak(*engine);
}

TEST(EngineRequests, FieldsOutOfRangeAreNamed) {
  Engine& engine = shared_engine();
  const float nan = std::nanf(""), infinity = std::numeric_limits<float>::infinity();
  const auto refused = [&](const std::string& field,
                           const std::function<void(GenerateRequest&)>& change) {
    GenerateRequest request = text_request(kPrompt, 4);
    change(request);
    expect_error([&] { engine.add(request); }, ErrorCode::invalid_argument, {field});
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
  expect_error([&] { engine.add(request); }, ErrorCode::invalid_argument,
               {"256 tokens", "context of 256"});
  request.tokens.assign(255, 7);
  EXPECT_EQ(engine.generate({&request, 1}).front().tokens.size(), 1u);
  expect_error([&] { (void)engine.logits(std::vector<int32_t>(257, 7)); },
               ErrorCode::invalid_argument, {"257", "256"});
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

TEST(EngineRequests, GenerateLeavesOthersEventsToThem) {
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

// Of four requests at most run at once: the last have not begun.
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

TEST(EngineOptions, AreCheckedByName) {
  const auto refused = [](const std::string& field, ErrorCode code,
                          const std::function<void(EngineOptions&)>& change) {
    EngineOptions options = small_options();
    change(options);
    expect_error([&] { (void)Engine::load(options); }, code, {field});
  };
  constexpr ErrorCode kInvalid = ErrorCode::invalid_argument;
  for (const int32_t value : {-1, 0, std::numeric_limits<int32_t>::max()}) {
    refused("page_size", kInvalid, [&](auto& o) { o.page_size = value; });
    refused("max_requests", kInvalid, [&](auto& o) { o.max_requests = value; });
    refused("max_batch_tokens", kInvalid, [&](auto& o) { o.max_batch_tokens = value; });
  }
  refused("max_context", kInvalid, [](auto& o) { o.max_context = -1; });
  refused("max_context is 8193", kInvalid, [](auto& o) { o.max_context = 8193; });
  refused("threads", kInvalid, [](auto& o) { o.threads = -1; });
  refused("kv_dtype", kInvalid, [](auto& o) { o.kv_dtype = DType::i32; });
  refused("kv_scale", kInvalid, [](auto& o) { o.kv_scale = KvScale::per_head; });
  refused("model_path", kInvalid, [](auto& o) { o.model_path.clear(); });
  refused("config.json", ErrorCode::io, [](auto& o) { o.model_path = "/nonexistent"; });
  refused("no_such_backend", kInvalid,
          [](auto& o) { o.backend = parse_backend_wish("no_such_backend"); });
  refused("budget", ErrorCode::out_of_memory, [](auto& o) { o.kv_memory_bytes = 100000; });
  refused("budget", ErrorCode::out_of_memory, [](auto& o) {
    o.kv_memory_bytes = 100;
    o.max_context = 0;
  });
}

TEST(EngineOptions, LatentCachesTakeTheirOwnFp8Format) {
  for (const auto& [dtype, scale] :
       {std::pair{DType::f8e5m2, KvScale::none}, {DType::f8e4m3, KvScale::per_head}}) {
    EngineOptions options = small_options("deepseek_v3");
    options.kv_dtype = dtype;
    options.kv_scale = scale;
    expect_error([&] { (void)Engine::load(options); }, ErrorCode::unsupported,
                 {"kv_lora_rank 512 and rope_dim 64", std::string(dtype_name(dtype))});
  }
}

TEST(EngineOptions, TheContextShrinksToTheBudget) {
  EngineOptions options = small_options();
  options.max_context = 0;
  options.kv_memory_bytes = size_t{1} << 20;
  const std::unique_ptr<Engine> engine = Engine::load(options);
  EXPECT_LT(engine->max_context(), 8192);
  EXPECT_GE(engine->max_context(), 128);
  EXPECT_LE(engine->stats().kv_bytes, options.kv_memory_bytes);
  GenerateRequest request = text_request("", 10000);
  request.tokens.assign(static_cast<size_t>(engine->max_context()) - 20, 11);
  EXPECT_EQ(engine->generate({&request, 1}).front().tokens.size(), 20u);
  expect_no_leak(*engine);
}

TEST(EngineOptions, ExplainNamesTheBackendOfEveryGroup) {
  EngineOptions options = small_options("gemma2");
  options.backend = parse_backend_wish("cpu");
  options.decode_backend = parse_backend_wish("reference");
  const std::unique_ptr<Engine> engine = Engine::load(options);
  const std::string text = engine->explain();
  for (const char* part : {"layers 0, 2, prefill", "layers 1, 3, decode", "cpu", "reference"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " is missing in\n" << text;
  options.batch_invariant = true;
  expect_error([&] { (void)Engine::load(options); }, ErrorCode::invalid_argument,
               {"batch_invariant", "decode_backend"});
}

TEST(EngineOptions, SplitBackendsGiveTheSameText) {
  for (const char* model : {"llama", "gemma2", "deepseek_v3", "qwen3_next"}) {
    EngineOptions options = small_options(model);
    options.backend = parse_backend_wish("cpu");
    options.decode_backend = parse_backend_wish("reference");
    const std::unique_ptr<Engine> engine = Engine::load(options);
    std::vector<GenerateRequest> requests;
    const std::vector<ReferencePrompt> prompts = read_reference(model);
    for (size_t i = 0; i < 3; ++i) {
      requests.push_back(greedy_request(prompts[i]));
      requests.back().sampling.max_new_tokens = 12;
    }
    const std::vector<GenerateResult> results = engine->generate(requests);
    for (size_t i = 0; i < 3; ++i)
      EXPECT_TRUE(
          std::equal(results[i].tokens.begin(), results[i].tokens.end(), prompts[i].greedy.begin()))
          << model << " prompt " << i;
  }
}

// Batch-invariant mode: the bits of a request's logits do not depend on its company, on chunking or
// on cache hits. Log-probabilities show them.
TEST(EngineOptions, BatchInvariantBits) {
  for (const char* model : {"llama", "gemma2", "deepseek_v3", "qwen3_next"}) {
    EngineOptions options = small_options(model);
    options.batch_invariant = true;
    std::vector<GenerateRequest> requests;
    const std::vector<ReferencePrompt> prompts = read_reference(model);
    for (size_t i = 0; i < 3; ++i) {
      requests.push_back(greedy_request(prompts[i]));
      requests.back().sampling.max_new_tokens = 10;
      requests.back().sampling.logprobs = 5;
    }
    const auto bits = [](const GenerateResult& result) {
      std::vector<float> values = result.logprobs;
      for (const auto& top : result.top)
        for (const TokenLogprob& entry : top) values.push_back(entry.logprob);
      return values;
    };
    std::vector<std::vector<float>> alone;
    for (const GenerateRequest& request : requests) {
      const std::unique_ptr<Engine> engine = Engine::load(options);
      alone.push_back(bits(engine->generate({&request, 1}).front()));
    }
    options.max_batch_tokens = 37;
    const std::unique_ptr<Engine> engine = Engine::load(options);
    for (const bool warm : {false, true}) {
      const std::vector<GenerateResult> batched = engine->generate(requests);
      for (size_t i = 0; i < requests.size(); ++i)
        EXPECT_EQ(bits(batched[i]), alone[i]) << model << " prompt " << i << " warm " << warm;
    }
  }
}

TEST(EngineOptions, ReducedCachesStayCloseToTheText) {
  for (const char* model : {"llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next"}) {
    for (const DType dtype : {DType::f16, DType::bf16, DType::f8e4m3}) {
      EngineOptions options = small_options(model);
      options.kv_dtype = dtype;
      const std::unique_ptr<Engine> engine = Engine::load(options);
      const ReferencePrompt prompt = read_reference(model)[1];
      const std::vector<float> logits = engine->logits(prompt.tokens);
      const size_t width = static_cast<size_t>(engine->vocabulary());
      double error = 0, norm = 0;
      for (size_t i = 0; i < width; ++i) {
        const double expected = prompt.last_logits[i];
        error += std::pow(logits[logits.size() - width + i] - expected, 2);
        norm += expected * expected;
      }
      // One rounding per cached value: the relative error stays near the format's.
      const double limit = dtype == DType::f16 ? 2e-3 : dtype == DType::bf16 ? 1e-2 : 8e-2;
      EXPECT_LT(std::sqrt(error / norm), limit) << model << " " << dtype_name(dtype);
      EXPECT_GT(error, 0) << model << " " << dtype_name(dtype) << " changed nothing";
    }
  }
}

}  // namespace
}  // namespace fovea
