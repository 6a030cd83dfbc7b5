// SPDX-License-Identifier: Apache-2.0
// Requests with a JSON schema: their texts, greedy and drawn, and their errors.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/small_engine.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using nlohmann::json;

const std::string kSchema =
    R"({"type":"object","properties":{"n":{"type":"integer","minimum":-5,"maximum":120},)"
    R"("s":{"enum":["red","green"]},"b":{"type":"boolean"}},"required":["n","s"],)"
    R"("additionalProperties":false})";

TEST(JsonSchema, TextsAreValuesOfTheSchema) {
  Engine& engine = shared_engine();
  std::vector<GenerateRequest> requests;
  for (int i = 0; i < 12; ++i) {
    GenerateRequest& request = requests.emplace_back(text_request(kPrompt, 200));
    request.sampling.json_schema = kSchema;
    request.sampling.temperature = i == 0 ? 0 : 2;
    request.sampling.seed = static_cast<uint64_t>(i);
    request.sampling.ignore_eos = i % 2 == 1;
    request.sampling.logprobs = i % 3 == 0 ? 1 : -1;
  }
  const std::vector<GenerateResult> results = engine.generate(requests);
  for (const GenerateResult& result : results) {
    SCOPED_TRACE(result.text);
    EXPECT_EQ(result.finish, FinishReason::stop) << result.error;
    const json value = json::parse(result.text, nullptr, false);
    ASSERT_TRUE(value.is_object());
    EXPECT_GE(value.at("n"), -5);
    EXPECT_LE(value.at("n"), 120);
    EXPECT_TRUE(value.at("s") == "red" || value.at("s") == "green");
    EXPECT_EQ(value.size(), value.contains("b") ? 3u : 2u);
  }
  EXPECT_EQ(engine.generate({requests.data(), 1}).front().text, results[0].text)
      << "other requests changed the text";
}

TEST(JsonSchema, RequestsWithoutOneAreNotAffected) {
  Engine& engine = shared_engine();
  std::vector<GenerateRequest> requests = {text_request(kPrompt, 12), text_request(kPrompt, 12)};
  requests[1].sampling.json_schema = R"({"type":"object"})";
  const std::vector<GenerateResult> results = engine.generate(requests);
  EXPECT_EQ(results[0].tokens, engine.generate({requests.data(), 1}).front().tokens);
  EXPECT_TRUE(results[1].text.starts_with('{')) << results[1].text;
}

TEST(JsonSchema, WrongOnesAreNamed) {
  Engine& engine = shared_engine();
  GenerateRequest request = text_request(kPrompt, 4);
  for (const auto& [schema, says] : std::vector<std::pair<std::string, std::string>>{
           {"{", "json_schema"},
           {R"({"properties":{"x":{"pattern":"a","type":"string"}}})",
            "json_schema.x: the keyword 'pattern'"},
           {"false", "it allows no value"}}) {
    request.sampling.json_schema = schema;
    test::expect_invalid(says, [&] { engine.check(request); });
    test::expect_invalid(says, [&] { engine.add(request); });
  }
  EXPECT_TRUE(engine.idle());
}

}  // namespace
}  // namespace fovea
