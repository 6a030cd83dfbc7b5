// SPDX-License-Identifier: Apache-2.0
// Chats with tools: what the fields do to the request, and what an answer becomes.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "engine/small_engine.h"
#include "server/api_error.h"
#include "server/completion_answer.h"
#include "server/completion_request.h"
#include "support/chat_model.h"

namespace fovea::server {
namespace {

using nlohmann::json;

std::unique_ptr<Engine> load_chat_engine(const ChatModel& model) {
  EngineOptions options = small_options();
  options.model_path = model.folder();
  options.max_context = 4096;
  return Engine::load(options);
}

Engine& chat_engine(const std::string& chat = "qwen2_5") {
  static std::map<std::string, std::pair<std::unique_ptr<ChatModel>, std::unique_ptr<Engine>>> kept;
  auto& [model, engine] = kept[chat];
  if (!model) {
    model = std::make_unique<ChatModel>(chat);
    engine = load_chat_engine(*model);
  }
  return *engine;
}

const std::string kMessages = R"("messages": [{"role": "user", "content": "Weather in Rome?"}])";
const std::string kTools = R"("tools": [
    {"type": "function", "function": {"name": "weather", "description": "Tells it", "parameters":
      {"type": "object", "properties": {"town": {"type": "string"}, "days": {"type": "integer"}},
       "required": ["town"]}}},
    {"type": "function", "function": {"name": "clock"}}])";

CompletionRequest read(const std::string& fields, const std::string& chat = "qwen2_5") {
  return read_completion(Dialect::chat, "{" + fields + "}", chat_engine(chat));
}

std::string prompt_of(const std::string& fields, const std::string& chat = "qwen2_5") {
  const CompletionRequest request = read(fields, chat);
  std::string text;
  for (const int32_t token : request.prompts.at(0).tokens)
    text += chat_engine(chat).token_bytes(token);
  return text;
}

void expect_refused(const std::string& fields, const std::string& param,
                    const std::string& chat = "qwen2_5") {
  try {
    read(fields, chat);
    ADD_FAILURE() << "accepted: " << fields;
  } catch (const ApiError& error) {
    EXPECT_EQ(error.status(), 400);
    EXPECT_EQ(error.param(), param) << fields << ": " << error.what();
    EXPECT_EQ(std::string(error.what()).find("fovea_chat"), std::string::npos) << error.what();
  }
}

TEST(ChatTools, ReachTheTemplateInTheClientsOrder) {
  const std::string text = prompt_of(kMessages + "," + kTools);
  EXPECT_NE(text.find(R"("name": "weather", "description": "Tells it", "parameters": )"
                      R"({"type": "object", "properties": {"town": )"),
            text.npos)
      << text;
  EXPECT_NE(text.find("clock"), text.npos);
  EXPECT_EQ(prompt_of(kMessages + "," + kTools + R"(, "tool_choice": "none")"),
            prompt_of(kMessages));
}

TEST(ChatTools, BadFieldsAreNamed) {
  for (const auto& [fields, param] : std::vector<std::pair<std::string, std::string>>{
           {R"("tools": 1)", "tools"},
           {R"("tools": [1])", "tools[0]"},
           {R"("tools": [{"type": "code"}])", "tools[0].type"},
           {R"("tools": [{"type": "function"}])", "tools[0].function"},
           {R"("tools": [{"function": {"name": ""}}])", "tools[0].function.name"},
           {R"("tools": [{"function": {"name": 1}}])", "tools[0].function.name"},
           {R"("tools": [{"function": {"name": "f", "parameters": 1}}])",
            "tools[0].function.parameters"},
           {R"("tool_choice": "required")", "tool_choice"},
           {R"("tool_choice": "any")", "tool_choice"},
           {R"("tool_choice": 1)", "tool_choice"},
           {kTools + R"(, "tool_choice": {"type": "function"})", "tool_choice"},
           {kTools + R"(, "tool_choice": {"type": "function", "function": {"name": "x"}})",
            "tool_choice"},
           {kTools + R"(, "parallel_tool_calls": 1)", "parallel_tool_calls"},
           {kTools + R"(, "response_format": {"type": "json_object"})", "response_format"},
           {R"("tool_choice": "required", "tools": [{"function": {"name": "f", "parameters":
                {"type": "string", "pattern": "a"}}}])",
            "tools"},
           {R"("chat_template_kwargs": 1)", "chat_template_kwargs"},
           {R"("chat_template_kwargs": {"tools": []})", "chat_template_kwargs"},
           {R"("continue_final_message": 1)", "continue_final_message"},
           {R"("continue_final_message": true, "add_generation_prompt": true)",
            "add_generation_prompt"},
           {R"("documents": 1)", "documents"},
           {R"("reasoning_effort": 1)", "reasoning_effort"}}) {
    expect_refused(kMessages + "," + fields, param);
  }
  expect_refused(kMessages + "," + kTools, "tools", "smollm2");
  EXPECT_NO_THROW(read(kMessages + "," + kTools + R"(, "tool_choice": "required")", "smollm2"));
  std::string many = R"("tools": [{"function": {"name": "f", "parameters": {"a": 1)";
  for (int i = 0; i < 1024; ++i) many += ", \"" + std::to_string(i) + "\": 1";
  expect_refused(kMessages + "," + many + "}}}]", "");
}

TEST(ChatTools, MessagesOfToolsAreNamed) {
  for (const auto& [messages, param] : std::vector<std::pair<std::string, std::string>>{
           {R"({"role": "user", "content": "a", "tool_calls": [{}]})", "messages[0].tool_calls"},
           {R"({"role": "assistant", "tool_calls": 1})", "messages[0].tool_calls"},
           {R"({"role": "assistant", "tool_calls": []})", "messages[0].content"},
           {R"({"role": "assistant", "tool_calls": [1]})", "messages[0].tool_calls[0]"},
           {R"({"role": "assistant", "tool_calls": [{"function": 1}]})",
            "messages[0].tool_calls[0].function"},
           {R"({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]})",
            "messages[0].tool_calls[0].function.name"},
           {R"({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]})",
            "messages[0].tool_calls[0].function.arguments"},
           {R"({"role": "assistant", "tool_calls": [{"function": {"name": "f",
                "arguments": "{"}}]})",
            "messages"},
           {R"({"role": "assistant", "content": "a", "function_call": {"name": "f"}})",
            "messages[0].function_call"},
           {R"({"role": "tool", "content": "a", "tool_call_id": 1})", "messages[0].tool_call_id"},
           {R"({"role": "tool"})", "messages[0].content"}}) {
    expect_refused("\"messages\": [" + messages + "]", param);
  }
}

TEST(ChatTools, CallsAndResultsReachTheTemplate) {
  const std::string text = prompt_of(R"("messages": [
      {"role": "user",
       "content": [{"type": "text", "text": "Rome"}, {"type": "text", "text": "?"}]},
      {"role": "assistant", "content": null, "tool_calls": [{"id": "c1", "type": "function",
        "function": {"name": "weather", "arguments": "{\"town\": \"Rome\", \"days\": 2}"}}]},
      {"role": "tool", "tool_call_id": "c1", "content": "rain"}])");
  EXPECT_NE(text.find("Rome\n?"), text.npos) << text;
  EXPECT_NE(text.find("<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"town\": \"Rome\", "
                      "\"days\": 2}}\n</tool_call>"),
            text.npos)
      << text;
  EXPECT_NE(text.find("<tool_response>\nrain\n</tool_response>"), text.npos) << text;
}

TEST(ChatTools, MessagesOfErrorsNameNoFolder) {
  for (const char* const chat : {"gemma", "llama2"}) {
    expect_refused(R"("messages": [{"role": "assistant", "content": "a"}])", "messages", chat);
  }
}

TEST(ChatTools, TemplatesThatTakeTooManyStepsAreRefused) {
  const ChatModel model("qwen2_5");
  const std::string file = model.folder() + "/chat_template.jinja";
  std::filesystem::remove(file);
  std::ofstream(file) << "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}"
                         "{% endfor %}";
  const std::unique_ptr<Engine> engine = load_chat_engine(model);
  try {
    read_completion(Dialect::chat, "{" + kMessages + "}", *engine);
    ADD_FAILURE() << "accepted";
  } catch (const ApiError& error) {
    EXPECT_EQ(error.status(), 400);
    EXPECT_EQ(error.param(), "messages");
    EXPECT_NE(std::string(error.what()).find("steps"), std::string::npos) << error.what();
    EXPECT_EQ(std::string(error.what()).find(model.folder()), std::string::npos) << error.what();
  }
}

TEST(ChatTools, FieldsShapeThePrompt) {
  const std::string whole = prompt_of(kMessages);
  EXPECT_TRUE(whole.ends_with("<|im_start|>assistant\n")) << whole;
  EXPECT_EQ(
      prompt_of(kMessages + R"(, "add_generation_prompt": false)") + "<|im_start|>assistant\n",
      whole);
  const std::string continued = prompt_of(R"("messages": [{"role": "user", "content": "Count"},
      {"role": "assistant", "content": "1, 2,"}], "continue_final_message": true)");
  EXPECT_TRUE(continued.ends_with("<|im_start|>assistant\n1, 2,")) << continued;
  const std::string thinks = prompt_of(kMessages, "qwen3");
  EXPECT_EQ(
      prompt_of(kMessages + R"(, "chat_template_kwargs": {"enable_thinking": false})", "qwen3"),
      thinks + "<think>\n\n</think>\n\n");
}

TEST(ChatTools, ForcedCallsFollowASchema) {
  const auto schema = [](const std::string& choice) {
    const CompletionRequest request =
        read(kMessages + "," + kTools + ", \"tool_choice\": " + choice);
    EXPECT_EQ(request.requests(1).at(0).request.sampling.json_schema, request.tools.schema);
    return json::parse(request.tools.schema);
  };
  const json list = schema("\"required\"");
  EXPECT_EQ(list["minItems"], 1);
  EXPECT_FALSE(list.contains("maxItems"));
  EXPECT_EQ(list["items"]["anyOf"].size(), 2u);
  EXPECT_EQ(list["items"]["anyOf"][1]["properties"]["name"]["const"], "clock");
  EXPECT_EQ(schema("\"required\", \"parallel_tool_calls\": false")["maxItems"], 1);
  const json one = schema(R"({"type": "function", "function": {"name": "weather"}})");
  EXPECT_EQ(one["required"], json::array({"town"}));
  // References move with their schema.
  const CompletionRequest request = read(kMessages + R"(, "tool_choice": "required", "tools": [
      {"function": {"name": "f", "parameters": {"type": "object",
       "$defs": {"x": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/x"},
       "b": {"enum": [{"$ref": "#"}]}}}}}])");
  const json moved = json::parse(request.tools.schema)["items"]["anyOf"][0]["properties"];
  EXPECT_EQ(moved["arguments"]["properties"]["a"]["$ref"],
            "#/items/anyOf/0/properties/arguments/$defs/x");
  EXPECT_EQ(moved["arguments"]["properties"]["b"]["enum"][0]["$ref"], "#");
}

TEST(ChatTools, SchemasKeepTheOrderOfTheirMembers) {
  const CompletionRequest request = read(kMessages + R"(, "response_format": {"type": "json_schema",
      "json_schema": {"schema": {"type": "object", "properties": {"z": {}, "a": {}}}}})");
  EXPECT_LT(request.sampling.json_schema.find("\"z\""), request.sampling.json_schema.find("\"a\""));
}

// Feeds a text to an answer, piece by piece, and returns the choice of the whole answer, or what a
// client puts together from the stream.
json answer_of(const std::string& fields, const std::string& text, size_t piece, bool stream,
               FinishReason finish = FinishReason::stop) {
  Engine& engine = chat_engine();
  const CompletionRequest request =
      read(kMessages + "," + kTools + fields + (stream ? R"(, "stream": true)" : ""));
  CompletionAnswer answer(request, engine, "m", "chatcmpl-1", 0);
  std::string events;
  for (size_t at = 0; at < text.size(); at += piece)
    events += answer.add(0, {.token = 5, .text = text.substr(at, piece)});
  events += answer.add(0, {.finish = finish});
  if (!stream) return json::parse(answer.body())["choices"][0];
  json message = {{"role", ""}, {"content", ""}};
  json choice = {{"finish_reason", nullptr}};
  for (size_t at = 0; (at = events.find("data: ", at)) != events.npos; ++at) {
    const json part = json::parse(events.substr(at + 6, events.find("\n\n", at) - at - 6));
    const json& delta = part["choices"][0]["delta"];
    if (delta.contains("role")) message["role"] = delta["role"];
    if (delta.contains("content"))
      message["content"] =
          message["content"].get<std::string>() + delta["content"].get<std::string>();
    for (const json& call : delta.value("tool_calls", json::array())) {
      const auto index = call["index"].get<size_t>();
      if (call.contains("id")) {
        EXPECT_EQ(index, message.value("tool_calls", json::array()).size());
        message["tool_calls"][index] = {{"id", call["id"]}, {"type", call["type"]}};
        message["tool_calls"][index]["function"] = {{"name", call["function"]["name"]},
                                                    {"arguments", ""}};
      }
      json& function = message["tool_calls"][index]["function"];
      function["arguments"] = function["arguments"].get<std::string>() +
                              call["function"]["arguments"].get<std::string>();
    }
    choice["finish_reason"] = part["choices"][0]["finish_reason"];
  }
  choice["message"] = message;
  return choice;
}

// The text of an event leaves out special tokens; skip_special_tokens puts them back.
TEST(ChatTools, SpecialTokensAreShownIfWanted) {
  Engine& engine = chat_engine();
  const int32_t special = engine.encode_bare("<|bos|>").at(0);
  ASSERT_EQ(engine.decode({&special, 1}), "");
  for (const bool skips : {true, false}) {
    const CompletionRequest request =
        read(kMessages + R"(, "skip_special_tokens": )" + (skips ? "true" : "false"));
    CompletionAnswer answer(request, engine, "m", "chatcmpl-1", 0);
    answer.add(0, {.token = 300, .text = "a"});
    answer.add(0, {.token = special});
    answer.add(0, {.token = special, .finish = FinishReason::stop});
    const json choice = json::parse(answer.body())["choices"][0];
    EXPECT_EQ(choice["message"]["content"], skips ? "a" : "a" + engine.token_bytes(special));
  }
  expect_refused(kMessages + R"(, "skip_special_tokens": false, "stop": "x")",
                 "skip_special_tokens");
}

// Values without quotes get the types of the function's schema.
TEST(ChatTools, CallsOfQwen3CoderAreTyped) {
  Engine& engine = chat_engine("qwen3_coder");
  const CompletionRequest request = read(kMessages + R"(, "tools": [{"type": "function", "function":
      {"name": "weather", "parameters": {"type": "object", "properties":
      {"town": {"type": "string"}, "days": {"type": "integer"}}}}}])",
                                         "qwen3_coder");
  CompletionAnswer answer(request, engine, "m", "chatcmpl-1", 0);
  answer.add(0, {.token = 5,
                 .text = "<tool_call>\n<function=weather>\n<parameter=town>\n12\n</parameter>\n"
                         "<parameter=days>\n12\n</parameter>\n</function>\n</tool_call>"});
  answer.add(0, {.finish = FinishReason::stop});
  const json call = json::parse(answer.body())["choices"][0]["message"]["tool_calls"][0];
  EXPECT_EQ(call["function"]["name"], "weather");
  EXPECT_EQ(call["function"]["arguments"], R"({"town":"12","days":12})");
}

struct Answer {
  std::string fields, text, content;
  std::vector<ToolCall> calls;
  std::string finish = "tool_calls";
};

TEST(ChatTools, AnswersBecomeContentAndCalls) {
  const std::string named =
      R"(, "tool_choice": {"type": "function", "function": {"name": "clock"}})";
  const std::string both =
      R"(<tool_call>{"name": "weather", "arguments": {"town": "Rome"}}</tool_call>
<tool_call>{"name": "clock", "arguments": {}}</tool_call>)";
  const std::vector<Answer> answers = {
      {"", "It rains.", "It rains.", {}, "stop"},
      {"", "Look: " + both, "Look:", {{"weather", R"({"town":"Rome"})"}, {"clock", "{}"}}},
      {R"(, "parallel_tool_calls": false)", both, "", {{"weather", R"({"town":"Rome"})"}}},
      {R"(, "tool_choice": "none")", both, both, {}, "stop"},
      {R"(, "tool_choice": "required")",
       R"([{"name": "clock", "arguments": {}}, {"name": "weather", "arguments": {"town": "a"}}])",
       "",
       {{"clock", "{}"}, {"weather", R"({"town":"a"})"}}},
      {R"(, "tool_choice": "required")", R"([{"name": "clo)", R"([{"name": "clo)", {}, "stop"},
      {named, R"({ "a": 1 })", "", {{"clock", R"({ "a": 1 })"}}}};
  for (const Answer& answer : answers) {
    for (const size_t piece : {1, 4, 1000}) {
      for (const bool stream : {false, true}) {
        SCOPED_TRACE(answer.fields + answer.text + " " + std::to_string(piece));
        const json choice = answer_of(answer.fields, answer.text, piece, stream);
        EXPECT_EQ(choice["finish_reason"], answer.finish);
        const json& message = choice["message"];
        EXPECT_EQ(message["role"], "assistant");
        const json& content = message["content"];
        EXPECT_EQ(content.is_null() ? "" : content.get<std::string>(), answer.content);
        const json calls = message.value("tool_calls", json::array());
        ASSERT_EQ(calls.size(), answer.calls.size()) << message;
        for (size_t i = 0; i < calls.size(); ++i) {
          EXPECT_EQ(calls[i]["function"]["name"], answer.calls[i].name);
          EXPECT_EQ(calls[i]["function"]["arguments"], answer.calls[i].arguments);
          EXPECT_EQ(calls[i]["id"].get<std::string>().size(), 9u);
          EXPECT_EQ(calls[i]["type"], "function");
          EXPECT_TRUE(i == 0 || calls[i]["id"] != calls[0]["id"]);
        }
      }
    }
  }
  EXPECT_EQ(answer_of(named, "{", 1, false, FinishReason::length)["finish_reason"], "length");
}

}  // namespace
}  // namespace fovea::server
