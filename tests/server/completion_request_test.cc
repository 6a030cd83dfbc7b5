// SPDX-License-Identifier: Apache-2.0
// Bodies that the server refuses, with the field that the error names, and bodies that it takes.
#include "server/completion_request.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "engine/small_engine.h"
#include "server/api_error.h"

namespace fovea::server {
namespace {

using nlohmann::json;

CompletionRequest read(Dialect dialect, const std::string& body) {
  return read_completion(dialect, body, shared_engine());
}

// Expects status 400 and the parameter.
void expect_refused(Dialect dialect, const std::string& body, const std::string& param) {
  try {
    read(dialect, body);
    ADD_FAILURE() << "accepted: " << body.substr(0, 200);
  } catch (const ApiError& error) {
    EXPECT_EQ(error.status(), 400) << body.substr(0, 200);
    EXPECT_EQ(error.param(), param) << body.substr(0, 200) << ": " << error.what();
    const json answer = json::parse(error.body());
    EXPECT_EQ(answer["error"]["code"], 400);
    EXPECT_TRUE(answer["error"]["message"].is_string());
  }
}

TEST(CompletionBody, ThatIsNoObjectIsRefused) {
  std::string deep(65, '[');
  deep += std::string(65, ']');
  for (const std::string& body :
       {std::string(), std::string("["), std::string("[]"), std::string("null"),
        std::string("{\"prompt\": NaN}"), std::string("{\"prompt\": \"\xff\"}"),
        std::string("{\"a\":1,\"a\":2}"), std::string("{} x"),
        std::string("{\"temperature\": 1e999}"), "{\"prompt\": " + deep + "}",
        std::string("{\"p\0\": 1}", 9)}) {
    expect_refused(Dialect::completions, body, "");
  }
}

TEST(CompletionBody, ErrorsOfJsonQuoteNoText) {
  try {
    read(Dialect::completions, R"({"prompt": "a secret)");
    ADD_FAILURE() << "accepted";
  } catch (const ApiError& error) {
    EXPECT_EQ(std::string(error.what()).find("secret"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("column"), std::string::npos) << error.what();
  }
}

struct Field {
  std::string name;
  std::vector<std::string> bad;  // JSON values
  std::vector<std::string> good;
};

const std::string kNumbers[] = {"2147483648", "1e308", "\"1\"", "[]", "{}", "true", "-1e308"};

const std::vector<Field>& common_fields() {
  static const std::vector<Field> all = {
      {"n", {"-1", "0", "129", "1.5"}, {"1", "2", "null", "2.0"}},
      {"max_tokens", {"-1", "1.5"}, {"1", "2147483647", "null"}},
      {"temperature", {"-1", "101"}, {"0", "1", "2", "0.5", "null"}},
      {"top_p", {"-1", "0", "1.01"}, {"1", "0.1", "null"}},
      {"top_k", {"-2", "1.5"}, {"-1", "0", "50", "null"}},
      {"min_p", {"-0.1", "1.1"}, {"0", "1", "null"}},
      {"presence_penalty", {"-2.1", "2.1"}, {"-2", "2", "null"}},
      {"frequency_penalty", {"-2.1", "2.1"}, {"-2", "2", "null"}},
      {"repetition_penalty", {"-1", "0", "101"}, {"1", "1.5", "null"}},
      {"min_tokens", {"-1", "65"}, {"0", "64", "null"}},
      {"priority", {"-3601", "3601"}, {"-1", "5", "null"}},
      {"prompt_logprobs", {"-2", "21"}, {"-1", "0", "20", "null"}},
  };
  return all;
}

std::string body_with(Dialect dialect, const std::string& name, const std::string& value) {
  std::string body = dialect == Dialect::chat
                         ? R"({"messages": [{"role": "user", "content": "Hi"}])"
                         : R"({"prompt": "Hi")";
  if (name != "max_tokens") body += R"(, "max_tokens": 64)";
  return body + ", \"" + name + "\": " + value + "}";
}

TEST(CompletionBody, NumbersOutOfRangeAreNamed) {
  for (const Field& field : common_fields()) {
    for (const std::string& value : field.bad)
      expect_refused(Dialect::completions, body_with(Dialect::completions, field.name, value),
                     field.name);
    for (const std::string& value : kNumbers)
      expect_refused(Dialect::completions, body_with(Dialect::completions, field.name, value),
                     field.name);
    for (const std::string& value : field.good)
      EXPECT_NO_THROW(
          read(Dialect::completions, body_with(Dialect::completions, field.name, value)))
          << field.name << " " << value;
  }
}

TEST(CompletionBody, OtherFieldsOutOfRangeAreNamed) {
  const std::vector<Field> fields = {
      {"seed",
       {"1e308", "\"1\"", "1.5", "18446744073709551616"},
       {"0", "-1", "9223372036854775807", "null"}},
      {"logprobs", {"-1", "21", "true", "\"5\""}, {"0", "20", "null"}},
      {"best_of", {"0", "129", "\"1\""}, {"1", "3", "null"}},
      {"echo", {"1", "\"true\""}, {"true", "false", "null"}},
      {"stream", {"1", "\"true\""}, {"true", "false", "null"}},
      {"stream_options", {"1", "[]", R"({"include_usage": true})"}, {"null", "{}"}},
      {"stop",
       {"1", "[1]", "\"\"", "[\"\"]", "{}", "[[\"a\"]]"},
       {"\"a\"", "[\"a\", \"b\"]", "[]"}},
      {"stop_token_ids", {"1", "[-1]", "[2048]", "[1.5]", "[\"1\"]"}, {"[1, 2]", "[]", "null"}},
      {"logit_bias",
       {"1", "[]", R"({"a": 1})", R"({"-1": 1})", R"({"2048": 1})", R"({" 1": 1})"},
       {R"({"1": 100, "2": -100})", "{}", "null"}},
      {"ignore_eos", {"1"}, {"true", "null"}},
      {"cache_salt", {"1", "[]"}, {"\"a\"", "null"}},
      {"model", {"1", "[]"}, {"\"a\"", "null"}},
      {"add_special_tokens", {"1"}, {"true", "false"}},
      {"suffix", {"\"x\"", "1"}, {"\"\"", "null"}},
      {"tools", {"[1]", "{}"}, {"[]", "null"}},
      {"response_format",
       {"1", "[]"},
       {R"({"type": "text"})", R"({"type": "json_object"})", "null",
        R"({"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}})"}},
      {"chat_template", {"\"{{ x }}\"", "\"\""}, {"null"}},
      {"use_beam_search", {"true"}, {"false"}},
      {"prompt_embeds", {"\"x\""}, {"null"}},
      {"truncate_prompt_tokens", {"-2", "0", "256", "true", "\"1\""}, {"-1", "1", "255", "null"}},
      {"skip_special_tokens", {"1"}, {"true", "false", "null"}},
      {"structured_outputs",
       {"1", R"({"regex": "a"})", R"({"choice": ["a"]})", R"({"json": {"type": "frog"}})",
        R"({"json": "{"})"},
       {"{}", "null", R"({"json": {"type": "integer"}})", R"({"json": "{\"type\": \"null\"}"})",
        R"({"json_object": true, "regex": null, "disable_any_whitespace": false})"}},
      {"guided_json", {R"({"type": "frog"})"}, {R"({"type": "integer"})", "null"}},
      {"prediction", {}, {R"({"type": "content", "content": "a"})", "null"}},
      {"regex", {"\"a\""}, {"null"}},
      {"kv_transfer_params", {"{}"}, {"null"}},
  };
  for (const Field& field : fields) {
    for (const std::string& value : field.bad) {
      std::string param = field.name;
      if (value.find("include_usage") != value.npos) param = "stream_options";
      expect_refused(Dialect::completions, body_with(Dialect::completions, field.name, value),
                     param);
    }
    for (const std::string& value : field.good)
      EXPECT_NO_THROW(
          read(Dialect::completions, body_with(Dialect::completions, field.name, value)))
          << field.name << " " << value;
  }
}

TEST(CompletionBody, NestedFieldsAreNamedByTheirPath) {
  for (const auto& [format, param] : std::vector<std::pair<std::string, std::string>>{
           {R"({"type": "xml"})", "response_format.type"},
           {R"({"type": "json_schema"})", "response_format.json_schema"},
           {R"({"type": "json_schema", "json_schema": {"schema": {"type": "frog"}}})",
            "response_format"}}) {
    expect_refused(Dialect::completions, body_with(Dialect::completions, "response_format", format),
                   param);
  }
  expect_refused(Dialect::completions,
                 body_with(Dialect::completions, "stream_options", R"({"include_usage": 1})"),
                 "stream_options.include_usage");
  expect_refused(Dialect::completions,
                 body_with(Dialect::completions, "logit_bias", R"({"1": 101})"), "logit_bias.1");
  expect_refused(Dialect::completions,
                 body_with(Dialect::completions, "logit_bias", R"({"1": "x"})"), "logit_bias.1");
}

TEST(CompletionBody, SchemasComeFromOneOfThreeFields) {
  const auto schema = [](const std::string& fields) {
    return read(Dialect::completions, "{\"prompt\": \"a\", " + fields + "}").sampling.json_schema;
  };
  const std::string ordered = R"({"type":"object","properties":{"z":{},"a":{}}})";
  EXPECT_EQ(schema("\"structured_outputs\": {\"json\": " + ordered + "}"), ordered);
  EXPECT_EQ(schema("\"guided_json\": " + ordered), ordered);
  EXPECT_EQ(schema("\"guided_json\": " + json(ordered).dump()), ordered);
  EXPECT_EQ(schema(R"("structured_outputs": {"json_object": true})"), R"({"type":"object"})");
  EXPECT_EQ(schema(R"("structured_outputs": {})"), "");
  expect_refused(
      Dialect::completions,
      R"({"prompt": "a", "response_format": {"type": "json_object"}, "guided_json": {}})",
      "guided_json");
}

TEST(CompletionBody, LongPromptsAreCutAtTheirBeginning) {
  const auto tokens = [](const std::string& limit) {
    const auto request =
        read(Dialect::completions,
             R"({"prompt": [5, 6, 7], "echo": true, "truncate_prompt_tokens": )" + limit + "}");
    EXPECT_EQ(request.prompts.at(0).text, shared_engine().decode(request.prompts.at(0).tokens));
    return request.prompts.at(0).tokens;
  };
  EXPECT_EQ(tokens("2"), (std::vector<int32_t>{6, 7}));
  EXPECT_EQ(tokens("3"), (std::vector<int32_t>{5, 6, 7}));
  const json longest = {{"prompt", std::vector<int32_t>(300, 7)}, {"truncate_prompt_tokens", -1}};
  EXPECT_EQ(read(Dialect::completions, longest.dump()).prompts.at(0).tokens.size(), 255u);
}

TEST(CompletionBody, PromptsAreTextsOrTokens) {
  Engine& engine = shared_engine();
  const auto prompts = [](const std::string& prompt) {
    return read(Dialect::completions, "{\"prompt\": " + prompt + "}").prompts;
  };
  EXPECT_EQ(prompts("\"And it\"").at(0).tokens, engine.encode("And it"));
  EXPECT_EQ(prompts("[5, 6]").at(0).tokens, (std::vector<int32_t>{5, 6}));
  EXPECT_EQ(prompts("[\"And\", \"it\"]").at(1).tokens, engine.encode("it"));
  EXPECT_EQ(prompts("[[5], [6, 7]]").at(1).tokens, (std::vector<int32_t>{6, 7}));
  for (const auto& [prompt, param] :
       std::vector<std::pair<std::string, std::string>>{{"1", "prompt"},
                                                        {"{}", "prompt"},
                                                        {"[]", "prompt"},
                                                        {"[-1]", "prompt"},
                                                        {"[2048]", "prompt"},
                                                        {"[5, \"a\"]", "prompt"},
                                                        {"[1e20]", "prompt"},
                                                        {"[\"a\", 5]", "prompt[1]"},
                                                        {"[[5], [2048]]", "prompt[1]"},
                                                        {"[[]]", "prompt[0]"}}) {
    expect_refused(Dialect::completions, "{\"prompt\": " + prompt + "}", param);
  }
  expect_refused(Dialect::completions, "{}", "prompt");
  json longest = {{"prompt", std::vector<int32_t>(255, 7)}};
  EXPECT_NO_THROW(read(Dialect::completions, longest.dump()));
  longest["prompt"].push_back(7);
  expect_refused(Dialect::completions, longest.dump(), "prompt");
  const json many = {{"prompt", std::vector<std::string>(129, "a")}};
  expect_refused(Dialect::completions, many.dump(), "prompt");
  const json choices = {{"prompt", std::vector<std::string>(65, "a")}, {"n", 2}};
  expect_refused(Dialect::completions, choices.dump(), "n");
}

TEST(CompletionBody, ChatsNameTheMessage) {
  for (const auto& [messages, param] : std::vector<std::pair<std::string, std::string>>{
           {"1", "messages"},
           {"[]", "messages"},
           {"[1]", "messages[0]"},
           {R"([{"role": "user"}])", "messages[0].content"},
           {R"([{"role": "user", "content": 1}])", "messages[0].content"},
           {R"([{"role": 1, "content": "a"}])", "messages[0].role"},
           {R"([{"role": "robot", "content": "a"}])", "messages[0].role"},
           {R"([{"content": "a"}])", "messages[0].role"},
           {R"([{"role": "user", "content": [1]}])", "messages[0].content[0]"},
           {R"([{"role": "user", "content": [{"type": "image_url",
                "image_url": {"url": "file:///etc/passwd"}}]}])",
            "messages[0].content[0].type"},
           {R"([{"role": "user", "content": [{"type": "text", "text": 5}]}])",
            "messages[0].content[0].text"},
           {R"([{"role": "system", "content": "a"}])", "messages"}}) {
    expect_refused(Dialect::chat, "{\"messages\": " + messages + "}", param);
  }
  expect_refused(Dialect::chat, "{}", "messages");
  // The model of the tests has no chat template.
  expect_refused(Dialect::chat, R"({"messages": [{"role": "user", "content": "a"}]})", "messages");
}

TEST(CompletionBody, UnknownFieldsAreKept) {
  const auto request = read(Dialect::completions,
                            R"({"prompt": "a", "frobnicate": 1, "user": "u", "metadata": {}})");
  EXPECT_EQ(request.ignored, std::vector<std::string>{"frobnicate"});
}

TEST(CompletionBody, FieldsReachTheirRequests) {
  const auto request = read(Dialect::completions, R"({
      "prompt": [[5], [6]], "n": 2, "best_of": 3, "max_tokens": 7, "temperature": 0.5, "seed": 9,
      "top_k": 4, "top_p": 0.5, "min_p": 0.25, "stop": "x", "stop_token_ids": [3], "priority": -2,
      "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5, "min_tokens": 2,
      "ignore_eos": true, "logit_bias": {"8": 2}, "cache_salt": "s"})");
  const auto requests = request.requests(77);
  ASSERT_EQ(requests.size(), 6u);
  for (size_t i = 0; i < requests.size(); ++i) {
    const SamplingParams& sampling = requests[i].request.sampling;
    EXPECT_EQ(requests[i].request.tokens, std::vector<int32_t>{i < 3 ? 5 : 6});
    EXPECT_EQ(sampling.seed, 9 + i % 3);
    EXPECT_EQ(sampling.max_new_tokens, 7);
    EXPECT_EQ(sampling.temperature, 0.5f);
    EXPECT_EQ(sampling.top_k, 4);
    EXPECT_EQ(sampling.top_p, 0.5f);
    EXPECT_EQ(sampling.min_p, 0.25f);
    EXPECT_EQ(sampling.stop, std::vector<std::string>{"x"});
    EXPECT_EQ(sampling.stop_tokens, std::vector<int32_t>{3});
    EXPECT_EQ(sampling.presence_penalty, 1);
    EXPECT_EQ(sampling.frequency_penalty, -1);
    EXPECT_EQ(sampling.repetition_penalty, 1.5f);
    EXPECT_EQ(sampling.min_tokens, 2);
    EXPECT_TRUE(sampling.ignore_eos);
    ASSERT_EQ(sampling.logit_bias.size(), 1u);
    EXPECT_EQ(sampling.logit_bias[0].token, 8);
    EXPECT_EQ(sampling.logprobs, 0) << "best_of ranks by log-probability";
    EXPECT_EQ(requests[i].request.salt, "s");
    EXPECT_EQ(requests[i].priority, -2);
  }
  const auto unseeded =
      read(Dialect::completions, R"({"prompt": ["a", "b"], "n": 2})").requests(77);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(unseeded[i].request.sampling.seed, 77 + i);
}

TEST(CompletionBody, StreamsRefuseWhatIsKnownAtTheEnd) {
  expect_refused(Dialect::completions, R"({"prompt": "a", "stream": true, "best_of": 2})",
                 "best_of");
  expect_refused(Dialect::completions,
                 R"({"prompt": "a", "stream": true, "echo": true, "logprobs": 1})", "echo");
  expect_refused(Dialect::completions, R"({"prompt": "a", "stream": true, "prompt_logprobs": 1})",
                 "prompt_logprobs");
  EXPECT_NO_THROW(read(Dialect::completions, R"({"prompt": "a", "stream": true, "echo": true})"));
  EXPECT_NO_THROW(read(Dialect::completions, R"({"prompt": "a", "echo": true, "max_tokens": 0})"));
}

}  // namespace
}  // namespace fovea::server
