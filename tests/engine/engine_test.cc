// SPDX-License-Identifier: Apache-2.0
// Text from an engine: streaming, stops, sampling, log-probabilities.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/sampler.h"
#include "engine/small_engine.h"
#include "model/patched_model.h"
#include "support/expect_error.h"
#include "tokenizer/test_files.h"
#include "tokenizer/utf8.h"

namespace fovea {
namespace {

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
  // A stop string that begins and ends inside tokens.
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

// The llama checkpoint with another tokenizer.json, or without one if the text is empty.
class OtherTokenizer {
 public:
  explicit OtherTokenizer(const std::optional<std::string>& text)
      : model_("llama", nlohmann::json::object()) {
    const std::filesystem::path file = std::filesystem::path(model_.folder()) / "tokenizer.json";
    std::filesystem::remove(file);
    if (text) std::ofstream(file) << *text;
  }
  std::unique_ptr<Engine> load() const {
    EngineOptions options = small_options();
    options.model_path = model_.folder();
    return Engine::load(options);
  }

 private:
  PatchedModel model_;
};

GenerateRequest token_request() {
  GenerateRequest request;
  request.tokens = {13, 269};
  request.sampling.max_new_tokens = 8;
  request.sampling.ignore_eos = true;
  return request;
}

TEST(EngineText, StopStringsMayBeSpecialTokens) {
  nlohmann::json document = read_json("models/llama/tokenizer.json");
  const GenerateRequest plain = token_request();
  const GenerateResult whole = shared_engine().generate({&plain, 1}).front();
  ASSERT_EQ(whole.tokens.size(), 8u);
  // The first token drawn becomes a special one.
  std::string name;
  for (const auto& [token, id] : document["model"]["vocab"].items()) {
    if (id == whole.tokens[0]) name = token;
  }
  document["model"]["vocab"].erase(name);
  document["model"]["vocab"]["<|zz|>"] = whole.tokens[0];
  nlohmann::json merges = nlohmann::json::array();
  for (const auto& merge : document["model"]["merges"]) {
    const std::string text = merge.is_string()
                                 ? merge.get<std::string>()
                                 : merge[0].get<std::string>() + " " + merge[1].get<std::string>();
    const size_t space = text.find(' ');
    const std::string left = text.substr(0, space), right = text.substr(space + 1);
    if (left != name && right != name && left + right != name) merges.push_back(text);
  }
  document["model"]["merges"] = merges;
  document["added_tokens"].push_back(
      {{"id", whole.tokens[0]}, {"content", "<|zz|>"}, {"special", true}});
  const std::unique_ptr<Engine> engine = OtherTokenizer(document.dump()).load();
  GenerateRequest request = token_request();
  request.sampling.stop = {"<|zz|>"};
  const GenerateResult result = engine->generate({&request, 1}).front();
  EXPECT_EQ(result.tokens, std::vector<int32_t>{whole.tokens[0]});
  EXPECT_EQ(result.finish, FinishReason::stop);
  EXPECT_EQ(result.text, "");
}

TEST(EngineText, TokenIdsRunWithoutAReadableTokenizer) {
  const GenerateRequest request = token_request();
  const GenerateResult whole = shared_engine().generate({&request, 1}).front();
  EXPECT_TRUE(shared_engine().has_text());
  for (const std::optional<std::string>& text :
       {std::optional<std::string>(), std::optional<std::string>("{"),
        std::optional<std::string>(R"({"model":{"type":"WordPiece","vocab":{}}})")}) {
    const std::unique_ptr<Engine> engine = OtherTokenizer(text).load();
    EXPECT_FALSE(engine->has_text());
    ASSERT_FALSE(engine->notes().empty());
    EXPECT_NE(engine->notes().back().find("token ids without text"), std::string::npos);
    const GenerateResult result = engine->generate({&request, 1}).front();
    EXPECT_EQ(result.tokens, whole.tokens);
    EXPECT_EQ(result.text, "");
    EXPECT_EQ(engine->decode(result.tokens), "");
    GenerateRequest stopped = token_request();
    stopped.sampling.stop = {"x"};
    for (const GenerateRequest& refused : {text_request("In", 1), stopped}) {
      test::expect_error(ErrorCode::unsupported, {"there is no tokenizer", "tokenizer.json"},
                         [&] { engine->add(refused); });
    }
  }
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

// The random number of a token depends on its position in the text.
TEST(EngineText, DrawsAreThoseOfTheirPositions) {
  Engine& engine = shared_engine();
  GenerateRequest request = text_request(kPrompt, 24);
  request.sampling.temperature = 1.5f;
  request.sampling.seed = 11;
  const GenerateResult result = engine.generate({&request, 1}).front();
  std::vector<int32_t> tokens = engine.encode(kPrompt);
  const size_t prompt = tokens.size();
  tokens.insert(tokens.end(), result.tokens.begin(), result.tokens.end());
  const std::vector<float> logits = engine.logits(tokens);
  const auto width = static_cast<size_t>(engine.vocabulary());
  Sampler sampler(engine.vocabulary());
  for (size_t i = prompt; i < tokens.size(); ++i) {
    const std::span<const float> row(logits.data() + (i - 1) * width, width);
    EXPECT_EQ(tokens[i], sampler.sample(row, request.sampling, i).token) << "position " << i;
  }
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

}  // namespace
}  // namespace fovea
