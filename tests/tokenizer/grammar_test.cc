// SPDX-License-Identifier: Apache-2.0
// Grammars of JSON schemas: texts that the PyPI package `jsonschema` allows and refuses
// (testdata/grammar by tools/make_grammar_goldens.py), masks against the parse of every token,
// texts sampled from masks, and refused schemas.
#include "tokenizer/grammar/grammar.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "support/expect_error.h"
#include "tokenizer/tokenizer.h"

namespace fovea::grammar {
namespace {

using Json = nlohmann::ordered_json;

std::vector<std::string> vocabulary_of(const std::string& file) {
  const Tokenizer tokenizer = Tokenizer::open(FOVEA_SOURCE_DIR "/testdata/tokenizer/" + file);
  std::vector<std::string> bytes;
  for (int32_t token = 0; token < tokenizer.size(); ++token)
    bytes.push_back(tokenizer.special_text(token).empty() ? tokenizer.token_bytes(token) : "");
  // Tokens of JSON, which a small vocabulary lacks.
  for (const char* text :
       {"{\"",  "\": ", "\":",  "\",",  "\"}",   "},",    "]}",  "\"]}", "[[", "{}", "[]",
        "\n  ", ", \"", "null", "true", "false", "\\u00", "\\n", "12",   "-",  "e5"})
    bytes.emplace_back(text);
  return bytes;
}

std::shared_ptr<const TokenTrie> small_trie() {
  static const auto trie = std::make_shared<const TokenTrie>(vocabulary_of("gpt2.json"));
  return trie;
}

std::shared_ptr<const Grammar> grammar_of(const std::string& schema) {
  return std::make_shared<const Grammar>(schema, small_trie());
}

bool allows(const std::string& schema, std::string_view text) {
  GrammarState state(grammar_of(schema));
  return state.accept(text) && state.is_complete();
}

Json goldens() {
  std::ifstream file(FOVEA_SOURCE_DIR "/testdata/grammar/goldens.json");
  return Json::parse(file);
}

std::string type_of(const Json& value) {
  if (value.is_number_integer()) return "integer";
  return value.is_null() ? "null" : value.is_boolean() ? "boolean" : value.type_name();
}

bool is_valid(const Json& schema, const Json& value, const Json& root);

bool is_valid_object(const Json& schema, const Json& value, const Json& root) {
  for (const Json& name : schema.value("required", Json::array()))
    if (!value.contains(name.get<std::string>())) return false;
  const Json properties = schema.value("properties", Json::object());
  const Json others = schema.value("additionalProperties", Json(true));
  for (const auto& [key, part] : value.items()) {
    const Json& rule = properties.contains(key) ? properties[key] : others;
    if (!is_valid(rule, part, root)) return false;
  }
  return true;
}

// A validator of the keywords that grammars know, written without their code.
bool is_valid(const Json& schema, const Json& value, const Json& root) {
  if (schema.is_boolean()) return schema.get<bool>();
  if (schema.contains("$ref"))
    return is_valid(root.at(Json::json_pointer(schema["$ref"].get<std::string>().substr(1))), value,
                    root);
  if (schema.contains("enum") && std::ranges::find(schema["enum"], value) == schema["enum"].end())
    return false;
  if (schema.contains("const") && schema["const"] != value) return false;
  for (const char* any : {"anyOf", "oneOf"}) {
    if (!schema.contains(any)) continue;
    const auto valid = std::ranges::count_if(
        schema[any], [&](const Json& choice) { return is_valid(choice, value, root); });
    if (std::string_view(any) == "anyOf" ? valid == 0 : valid != 1) return false;
  }
  if (schema.contains("type")) {
    const Json types = schema["type"].is_array() ? schema["type"] : Json::array({schema["type"]});
    const bool fits = std::ranges::any_of(types, [&](const Json& type) {
      return type == type_of(value) || (type == "number" && value.is_number());
    });
    if (!fits) return false;
  }
  if (value.is_object()) return is_valid_object(schema, value, root);
  if (value.is_array()) {
    if (value.size() < schema.value("minItems", 0u) ||
        value.size() > schema.value("maxItems", 1'000'000u))
      return false;
    return std::ranges::all_of(value, [&](const Json& item) {
      return is_valid(schema.value("items", Json(true)), item, root);
    });
  }
  if (value.is_string()) {
    const std::string text = value;
    const auto length = std::ranges::count_if(
        text, [](char byte) { return (static_cast<uint8_t>(byte) & 0xC0) != 0x80; });
    return length >= schema.value("minLength", 0) && length <= schema.value("maxLength", 1'000'000);
  }
  if (value.is_number()) {
    const double number = value;
    return number >= schema.value("minimum", -1e300) && number <= schema.value("maximum", 1e300) &&
           number > schema.value("exclusiveMinimum", -1e301) &&
           number < schema.value("exclusiveMaximum", 1e301);
  }
  return true;
}

TEST(Grammar, AllowsAndRefusesTextsAsTheReferenceDoes) {
  int compared = 0;
  for (const Json& golden : goldens()) {
    const std::string schema = golden["schema"].dump();
    SCOPED_TRACE(schema);
    for (const std::string text : golden["allowed"]) {
      EXPECT_TRUE(allows(schema, text)) << text;
      ++compared;
    }
    for (const std::string text : golden["refused"]) {
      EXPECT_FALSE(allows(schema, text)) << text;
      ++compared;
    }
  }
  EXPECT_GT(compared, 3000);
}

const std::string kTree =
    R"({"$defs":{"node":{"type":"object","properties":{"v":{"type":"integer"},"next":{"anyOf":[)"
    R"({"$ref":"#/$defs/node"},{"type":"null"}]}},"required":["v","next"],)"
    R"("additionalProperties":false}},)"
    R"("$ref":"#/$defs/node"})";

// Draws random tokens from masks until the text is complete. After some tokens it prefers those
// that end something.
std::string sampled(const std::shared_ptr<const Grammar>& grammar,
                    const std::vector<std::string>& vocabulary, std::mt19937& random,
                    bool check_masks) {
  GrammarState state(grammar);
  std::string text;
  TokenMask mask;
  for (int step = 0; step < 3000; ++step) {
    if (state.is_complete() && (!state.may_continue() || random() % 4 == 0)) return text;
    state.mask(vocabulary.size(), mask);
    std::vector<int32_t> allowed, closing;
    for (int32_t token = 0; token < static_cast<int32_t>(vocabulary.size()); ++token) {
      const std::string& bytes = vocabulary[static_cast<size_t>(token)];
      if (check_masks && step % 7 == 0) {
        GrammarState copy = state;
        EXPECT_EQ(has(mask, token), !bytes.empty() && copy.accept(bytes)) << text << " + " << bytes;
      }
      if (!has(mask, token)) continue;
      allowed.push_back(token);
      if (bytes.find_first_of("\"]}") != bytes.npos && bytes.find_first_of("[{") == bytes.npos)
        closing.push_back(token);
    }
    EXPECT_FALSE(allowed.empty()) << "nothing may follow " << text;
    if (allowed.empty()) return text;
    const bool close = step > 30 && !closing.empty();
    const std::vector<int32_t>& from = close ? closing : allowed;
    const std::string& bytes = vocabulary[static_cast<size_t>(from[random() % from.size()])];
    EXPECT_TRUE(state.accept(bytes)) << text << " + " << bytes;
    text += bytes;
  }
  ADD_FAILURE() << "the text does not end: " << text.substr(0, 200);
  return text;
}

TEST(Grammar, SampledTextsAreValid) {
  const std::vector<std::string> vocabulary = vocabulary_of("gpt2.json");
  std::mt19937 random(7);
  std::vector<std::string> schemas = {
      kTree, "{\"type\":\"object\"}", "{}",
      R"({"type":"object","properties":{"s":{"type":"string","minLength":3,"maxLength":5},)"
      R"("n":{"type":"integer","minimum":-250,"exclusiveMaximum":1199}},)"
      R"("required":["n"],"additionalProperties":{"type":"array","items":{"type":"number"}}})",
      R"({"oneOf":[{"type":"object","properties":{"k":{"const":"a"}},"required":["k"]},)"
      R"({"type":"object","properties":{"k":{"const":"b"},"x":{"type":"boolean"}},)"
      R"("required":["k","x"]}]})"};
  const Json given = goldens();
  for (size_t i = 0; i < given.size(); i += 5) schemas.push_back(given[i]["schema"].dump());
  for (size_t i = 0; i < schemas.size(); ++i) {
    SCOPED_TRACE(schemas[i]);
    const Json schema = Json::parse(schemas[i]);
    const auto grammar = grammar_of(schemas[i]);
    for (int round = 0; round < 4; ++round) {
      const std::string text = sampled(grammar, vocabulary, random, i < 12 && round == 0);
      const Json value = Json::parse(text, nullptr, false);
      ASSERT_FALSE(value.is_discarded()) << text;
      EXPECT_TRUE(is_valid(schema, value, schema)) << text;
    }
  }
}

TEST(Grammar, TextsAtTheEdges) {
  struct Case {
    std::string schema, text;
    bool allowed;
  };
  const std::string text = R"({"type":"string"})";
  const std::string small = R"({"type":"integer","minimum":-12,"maximum":105})";
  for (const Case& edge :
       std::vector<Case>{{text, R"("\ud83d\ude00")", true},
                         {text, R"("\ud83d")", false},
                         {text, R"("\ude00")", false},
                         {text, R"("\x")", false},
                         {text, "\"\xC3\xA9\"", true},
                         {text, "\"\xC3\"", false},
                         {text, "\"\xED\xA0\x80\"", false},
                         {text, "\"a\nb\"", false},
                         {text, "\"\x7F\"", true},
                         {R"({"type":"string","maxLength":1})", R"("\ud83d\ude00")", true},
                         {R"({"type":"string","minLength":2})", R"("\u00e9")", false},
                         {small, "-12", true},
                         {small, "-13", false},
                         {small, "105", true},
                         {small, "106", false},
                         {small, "0", true},
                         {small, "-0", false},
                         {small, "99", true},
                         {small, "007", false},
                         {R"({"type":"integer","minimum":2.5})", "2", false},
                         {R"({"type":"integer","minimum":2.5})", "3", true},
                         {R"({"type":"integer","maximum":-7})", "-7", true},
                         {R"({"type":"integer","maximum":-7})", "-6", false},
                         {R"({"type":"number"})", "-0.5e+10", true},
                         {R"({"type":"number"})", "1.", false},
                         {R"({"type":"number"})", ".5", false},
                         {R"({"type":"number"})", "1e", false},
                         {"{}", "[1, {\"a\": [ ]}]", true},
                         {"{}", "[1,]", false},
                         {"{}", "{\"a\":1", false},
                         {"{}", " 1", false},
                         {R"({"properties":{"a":{},"b":{}},"additionalProperties":true})",
                          R"({"c":1,"ab":2})", true},
                         {R"({"properties":{"a":{"type":"null"}},"additionalProperties":true})",
                          R"({"a":1})", false},
                         {R"({"properties":{"a":{"type":"null"}},"additionalProperties":true})",
                          R"({"\u0061":1})", false},
                         {R"({"required":["x"]})", R"({"x":[1]})", true},
                         {R"({"required":["x"]})", "{}", false},
                         {R"({"properties":{"a":false,"b":{}}})", R"({"a":1})", false},
                         {R"({"properties":{"a":false,"b":{}}})", R"({"b":1})", true},
                         {R"({"type":"array","items":false})", "[]", true},
                         {R"({"type":"array","maxItems":0})", "[]", true},
                         {R"({"type":"array","maxItems":0})", "[1]", false},
                         {R"({"enum":["a",1],"type":"string"})", "1", false},
                         {kTree, R"({"v":1,"next":{"v":2,"next":null}})", true},
                         {kTree, R"({"v":1,"next":{"v":2}})", false}}) {
    EXPECT_EQ(allows(edge.schema, edge.text), edge.allowed) << edge.schema << " " << edge.text;
  }
}

TEST(Grammar, RefusesSchemasByName) {
  struct Case {
    std::string schema, says;
  };
  for (const Case& wrong : std::vector<Case>{
           {"[", "json_schema"},
           {"3", "the schema is number"},
           {"false", "it allows no value"},
           {R"({"type":"text"})", "'type' has \"text\""},
           {R"({"type":"string","pattern":"a"})",
            "json_schema: the keyword 'pattern' is not supported"},
           {R"({"properties":{"a":{"type":"object","minProperties":1}}})",
            "json_schema.a: the keyword 'minProperties'"},
           {R"({"type":"number","minimum":1})", "the keyword 'minimum'"},
           {R"({"not":{}})", "the keyword 'not'"},
           {R"({"type":"string","minLength":-1})", "'minLength' is -1"},
           {R"({"type":"string","minLength":3,"maxLength":2})", "'maxLength' is 2"},
           {R"({"type":"array","minItems":3,"maxItems":2})", "'maxItems' is 2"},
           {R"({"type":"integer","minimum":3,"maximum":2})", "no integer is between 3 and 2"},
           {R"({"type":"string","maxLength":900000})", "more than 300000 states"},
           {R"({"$ref":"http://x"})", "nothing is fetched"},
           {R"({"$ref":"#/$defs/x"})", "refers to nothing"},
           {R"({"$ref":"#"})", "refers to itself"},
           {R"({"$defs":{"a":{"type":"array","items":{"$ref":"#/$defs/a"},)"
            R"("minItems":1}},"$ref":"#/$defs/a"})",
            "it allows no value"},
           {R"({"anyOf":[]})", "'anyOf' must be a list"},
           {R"({"allOf":[{},{}]})", "'allOf' with 2 entries"},
           {R"({"oneOf":[{"type":"integer"},{"type":"number"}]})", "entries 0 and 1 may allow"},
           {R"({"oneOf":[{"type":"object"},{"type":"object"}]})", "entries 0 and 1 may allow"},
           {R"({"enum":3})", "'enum' must be a list"},
           {R"({"required":["a"],"additionalProperties":false})", "no property allows"},
           {std::string(100, '[') + std::string(100, ']'), "json_schema"},
           {"\"" + std::string(100'001, 'x') + "\"", "the limit is 100000"}}) {
    SCOPED_TRACE(wrong.schema.substr(0, 100));
    test::expect_invalid(wrong.says, [&] { (void)grammar_of(wrong.schema); });
  }
}

TEST(Grammar, DeepValuesEndAtTheLimit) {
  GrammarState state(grammar_of("{}"));
  int depth = 0;
  while (depth < 1000 && state.accept("[")) ++depth;
  EXPECT_GE(depth, 30);
  EXPECT_LT(depth, 1000);
  TokenMask mask;
  state.mask(small_trie()->vocabulary(), mask);
  EXPECT_TRUE(std::ranges::any_of(mask, [](uint64_t word) { return word != 0; }));
  for (int i = 0; i < depth; ++i) ASSERT_TRUE(state.accept("]")) << i;
  EXPECT_TRUE(state.is_complete());
  EXPECT_FALSE(state.may_continue());
}

}  // namespace
}  // namespace fovea::grammar
