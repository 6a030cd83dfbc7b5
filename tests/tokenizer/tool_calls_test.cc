// SPDX-License-Identifier: Apache-2.0
#include "fovea/tool_calls.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

namespace fovea {
namespace {

struct Case {
  ToolCallFormat format;
  std::string text;
  std::string content;
  std::vector<ToolCall> calls;
};

const std::string kTools = R"([{"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {
        "text": {"type": "string"}, "number": {"type": "number"}, "flag": {"type": "boolean"},
        "list": {"type": "array"}, "maybe": {"type": ["string", "null"]}}}}}])";

const std::vector<Case>& cases() {
  using enum ToolCallFormat;
  static const std::vector<Case> kCases = {
      {none,
       "<tool_call>{\"name\": \"f\"}</tool_call>",
       "<tool_call>{\"name\": \"f\"}</tool_call>",
       {}},
      {hermes, "Hello <b> there", "Hello <b> there", {}},
      {hermes, "", "", {}},
      {hermes, " ends with space \n", " ends with space \n", {}},
      {hermes,
       "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": [1, \"}\"]}}\n</tool_call>",
       "",
       {{"f", R"({"x":[1,"}"]})"}}},
      {hermes,
       "Let me see.\n\n<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>\n<tool_call>"
       "{\"name\":\"g\",\"arguments\":\"{\\\"z\\\": 1, \\\"a\\\": 2}\"}</tool_call>\n",
       "Let me see.",
       {{"f", "{}"}, {"g", R"({"z":1,"a":2})"}}},
      {hermes, "<tool_call>{\"name\": \"f\"}", "", {{"f", "{}"}}},
      {hermes, "<tool_call>{\"name\": \"f\"", "<tool_call>{\"name\": \"f\"", {}},
      {hermes, "<tool_call>f(x)</tool_call> ok", "<tool_call>f(x)</tool_call> ok", {}},
      {hermes,
       "a <tool_call>{\"name\":3}</tool_call>b",
       "a <tool_call>{\"name\":3}</tool_call>b",
       {}},
      {hermes,
       "<tool_call>{\"name\":\"f\",\"arguments\":[1]}</tool_call>",
       "<tool_call>{\"name\":\"f\",\"arguments\":[1]}</tool_call>",
       {}},
      {hermes,
       "x<tool_call>{\"name\":\"f\"}</tool_call> and <tool_",
       "x and <tool_",
       {{"f", "{}"}}},
      {llama3, R"({"name": "f", "parameters": {"x": "é"}})", "", {{"f", R"({"x":"é"})"}}},
      {llama3,
       R"(<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}})",
       "",
       {{"f", "{}"}, {"g", R"({"a":1})"}}},
      {llama3, "The answer is {\"name\": 1}", "The answer is {\"name\": 1}", {}},
      {llama3, R"({"city": "Rome"})", R"({"city": "Rome"})", {}},
      {llama3, R"({"name": "f", )", R"({"name": "f", )", {}},
      {llama3, "<|python_tag|>print(1)", "<|python_tag|>print(1)", {}},
      {llama3, "<", "<", {}},
      {mistral,
       R"([TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}])",
       "",
       {{"f", R"({"x":1})"}, {"g", "{}"}}},
      {mistral, R"([TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "a"}])", "", {{"f", "{}"}}},
      {mistral,
       R"([TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g{"y": [2]})",
       "",
       {{"f", R"({"x":1})"}, {"g", R"({"y":[2]})"}}},
      {mistral, "See [TOOL_CALL", "See [TOOL_CALL", {}},
      {mistral, "[TOOL_CALLS][{]", "[TOOL_CALLS][{]", {}},
      {mistral, "[TOOL_CALLS]nothing", "[TOOL_CALLS]nothing", {}},
      {hermes,
       "<tool_call>" + std::string(100, '[') + "</tool_call>",
       "<tool_call>" + std::string(100, '[') + "</tool_call>",
       {}}};
  return kCases;
}

// Formats whose values have no quotes.
const std::vector<Case>& cases_without_quotes() {
  using enum ToolCallFormat;
  static const std::vector<Case> kCases = {
      {qwen3_coder,
       "Let me see.\n<tool_call>\n<function=f>\n<parameter=text>\n5\n</parameter>\n"
       "<parameter=number>\n5\n</parameter>\n<parameter=list>\n[1, {\"a\": 2}]\n</parameter>\n"
       "</function>\n</tool_call>",
       "Let me see.",
       {{"f", R"({"text":"5","number":5,"list":[1,{"a":2}]})"}}},
      {qwen3_coder,
       "<tool_call><function=f><parameter=text>\n\na <b>\n c\n\n</parameter><parameter=flag>True"
       "</parameter><parameter=maybe>null</parameter></function></tool_call>\n<tool_call>"
       "<function=g></function></tool_call>",
       "",
       {{"f", R"({"text":"\na <b>\n c\n","flag":true,"maybe":null})"}, {"g", "{}"}}},
      {qwen3_coder,
       "<tool_call>\n<function=f>\n<parameter=number>\nmany\n</function>",
       "",
       {{"f", R"({"number":"many"})"}}},
      {qwen3_coder,
       "<tool_call>\n<function=unknown>\n<parameter=a>\n1.5\n</parameter>\n<parameter=b>\nx\n"
       "</parameter>\n</function>\n</tool_call>",
       "",
       {{"unknown", R"({"a":1.5,"b":"x"})"}}},
      {qwen3_coder,
       "<tool_call>{\"name\": \"f\"}</tool_call>",
       "<tool_call>{\"name\": \"f\"}</tool_call>",
       {}},
      {qwen3_coder,
       "<tool_call><function=f>what?</function></tool_call>",
       "<tool_call><function=f>what?</function></tool_call>",
       {}},
      {qwen3_coder,
       "<tool_call><function=></function></tool_call>",
       "<tool_call><function=></function></tool_call>",
       {}},
      {qwen3_coder,
       "<tool_call><function=f><parameter=list>" + std::string(100, '[') +
           "</parameter></function></tool_call>",
       "",
       {{"f", R"({"list":")" + std::string(100, '[') + R"("})"}}},
      {glm4,
       "I look.\n<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>12</arg_value>\n"
       "<arg_key>number</arg_key>\n<arg_value>12</arg_value>\n</tool_call>\n"
       "<tool_call>g</tool_call>",
       "I look.",
       {{"f", R"({"text":"12","number":12})"}, {"g", "{}"}}},
      {glm4,
       "<tool_call>f<arg_key>list</arg_key><arg_value>[\"é\"]</arg_value></tool_call>",
       "",
       {{"f", R"({"list":["é"]})"}}},
      {glm4, "<tool_call>f(x)</tool_call> ok", "<tool_call>f(x)</tool_call> ok", {}},
      {glm4,
       "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>",
       "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>",
       {}}};
  return kCases;
}

// Calls in Python.
const std::vector<Case>& python_cases() {
  static const auto called = [](const std::string& text) {
    return "<|tool_call_start|>" + text + "<|tool_call_end|>";
  };
  static const auto read = [](const std::string& text, std::vector<ToolCall> calls) {
    return Case{ToolCallFormat::lfm2, called(text), "", std::move(calls)};
  };
  static const auto refused = [](const std::string& text) {
    return Case{ToolCallFormat::lfm2, called(text) + " ok", called(text) + " ok", {}};
  };
  static const std::vector<Case> kCases = {
      {ToolCallFormat::lfm2,
       "I look. " + called(R"([f(text="Rome", number=-2.5e1), g()])") + "Wait.",
       "I look.Wait.",
       {{"f", R"({"text":"Rome","number":-25.0})"}, {"g", "{}"}}},
      {ToolCallFormat::lfm2, "<|tool_call_start|>[f(a=1)]", "", {{"f", R"({"a":1})"}}},
      {ToolCallFormat::lfm2, "<|tool_call_start|>[f(a=", "<|tool_call_start|>[f(a=", {}},
      {ToolCallFormat::lfm2, "a <|tool_call_st", "a <|tool_call_st", {}},
      read("files.find_all( a = True , b = False, c=None, d=true, e=null, )",
           {{"files.find_all", R"({"a":true,"b":false,"c":null,"d":true,"e":null})"}}),
      read(R"([f(a=[1, [], ("x",), {}], b={'k': {"l": [2.5]}, "m": 'n',},)])",
           {{"f", R"({"a":[1,[],["x"],{}],"b":{"k":{"l":[2.5]},"m":"n"}})"}}),
      read(R"([f(a='it\'s "so"', b="\x41\u00e9\U0001F600\d\n", c="),]")])",
           {{"f", "{\"a\":\"it's \\\"so\\\"\",\"b\":\"Aé😀\\\\d\\n\",\"c\":\"),]\"}"}}),
      read("[f(a=\"\"\"one \"word\"\nand \\\nmore\"\"\", b='', c='a\nb')]",
           {{"f", R"({"a":"one \"word\"\nand more","b":"","c":"a\nb"})"}}),
      read("[f(a=1, a=2)]", {{"f", R"({"a":2})"}}),
      read(R"([{"name": "f", "arguments": {"a": 1}}])", {{"f", R"({"a":1})"}}),
      refused(""),
      refused("[]"),
      refused("f"),
      refused("[f(1)]"),
      refused("[f(a=b)]"),
      refused("[f(a=1 b=2)]"),
      refused("[f(a=1) g()]"),
      refused("[f(a=1), ...]"),
      refused("[f(a=g())]"),
      refused("f(a=1), g()"),
      refused("[f(a={1: 2})]"),
      refused("[f(a=\"\\ud83d\")]"),
      refused("[f(a=\"\\xz1\")]"),
      refused("[f(a=\"open)]"),
      refused("[f(a=" + std::string(100, '[') + std::string(100, ']') + ")]")};
  return kCases;
}

void expect_output(const Case& expected, size_t piece) {
  SCOPED_TRACE(expected.text + ", in pieces of " + std::to_string(piece));
  ToolCallParser parser(expected.format, kTools);
  ToolCallParser::Output all;
  const auto add = [&](const ToolCallParser::Output& output) {
    all.content += output.content;
    all.calls.insert(all.calls.end(), output.calls.begin(), output.calls.end());
  };
  for (size_t at = 0; at < expected.text.size(); at += piece)
    add(parser.push(std::string_view(expected.text).substr(at, piece)));
  add(parser.finish());
  EXPECT_EQ(all.content, expected.content);
  ASSERT_EQ(all.calls.size(), expected.calls.size());
  for (size_t i = 0; i < all.calls.size(); ++i) {
    EXPECT_EQ(all.calls[i].name, expected.calls[i].name);
    EXPECT_EQ(all.calls[i].arguments, expected.calls[i].arguments);
  }
}

TEST(ToolCalls, AreFoundInPiecesOfAnySize) {
  for (const auto* list : {&cases(), &cases_without_quotes(), &python_cases()})
    for (const Case& expected : *list)
      for (const size_t piece : {1, 2, 3, 5, 11, 1000}) expect_output(expected, piece);
}

TEST(ToolCalls, ContentIsNotHeldBackWithoutNeed) {
  ToolCallParser parser(ToolCallFormat::hermes);
  EXPECT_EQ(parser.push("Hello").content, "Hello");
  EXPECT_EQ(parser.push(" you <").content, " you");
  EXPECT_EQ(parser.push("b>").content, " <b>");
  EXPECT_EQ(parser.push("<tool").content, "");
  EXPECT_EQ(parser.push("box>").content, "<toolbox>");
}

TEST(ToolCalls, ToolsThatAreNoneChangeNothing) {
  for (const char* tools :
       {"", "{", "1", "[1, {}, {\"function\": 1}, {\"function\": {\"name\": 1}}]"}) {
    ToolCallParser parser(ToolCallFormat::glm4, tools);
    const auto output =
        parser.push("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>");
    ASSERT_EQ(output.calls.size(), 1u) << tools;
    EXPECT_EQ(output.calls[0].arguments, R"({"a":1})");
  }
}

TEST(ToolCalls, FormatsAreRecognisedByTheTemplate) {
  using enum ToolCallFormat;
  const std::vector<std::pair<std::string, ToolCallFormat>> kFormats = {
      {"qwen2_5", hermes},
      {"qwen3", hermes},
      {"hermes", hermes},
      {"granite4", hermes},
      {"llama3_1", llama3},
      {"llama3_2", llama3},
      {"mistral_v0_3", mistral},
      {"mistral_v3_tools", mistral},
      {"smollm2", none},
      {"qwen3_coder", qwen3_coder},
      {"glm4", glm4},
      {"lfm2", lfm2},
      {"gemma3", none}};
  for (const auto& [name, format] : kFormats) {
    std::ifstream file(FOVEA_SOURCE_DIR "/testdata/chat/" + name + ".jinja");
    const std::string source{std::istreambuf_iterator<char>(file), {}};
    EXPECT_EQ(tool_call_format(source), format) << name;
  }
  // LFM2.5 has no marks around the list.
  EXPECT_EQ(tool_call_format("{{ 'List of tools: [' + tools | tojson }}"), lfm2);
}

}  // namespace
}  // namespace fovea
