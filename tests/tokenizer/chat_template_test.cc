// SPDX-License-Identifier: Apache-2.0
// Chats compared with those that the PyPI package `transformers` renders, stored in testdata/chat
// by tools/make_chat_goldens.py; where checkpoints keep templates; refused conversations.
#include "tokenizer/chat_template.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "support/expect_error.h"
#include "tokenizer/chat_template/read_json.h"

namespace fovea {
namespace {

namespace fs = std::filesystem;
using jinja::Dict;
using nlohmann::ordered_json;

const std::string kChat = FOVEA_SOURCE_DIR "/testdata/chat/";

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string today(const char* format) {
  const std::time_t now = std::time(nullptr);
  std::array<char, 64> text{};
  std::strftime(text.data(), text.size(), format, std::localtime(&now));
  return text.data();
}

// Goldens have formats in braces instead of dates.
std::string with_dates(std::string text) {
  for (const char* format : {"%d %b %Y", "%Y-%m-%d", "%B %d, %Y", "%d %B %Y"}) {
    const std::string mark = "{" + std::string(format) + "}";
    for (size_t at; (at = text.find(mark)) != text.npos;)
      text.replace(at, mark.size(), today(format));
  }
  return text;
}

Dict tokens(const std::string& bos = "<s>", const std::string& eos = "</s>") {
  Dict dict;
  if (!bos.empty()) dict.set("bos_token", bos);
  if (!eos.empty()) dict.set("eos_token", eos);
  return dict;
}

Conversation conversation_of(const ordered_json& given, const ordered_json& tools, bool answer) {
  Conversation conversation{.messages = given["messages"].dump()};
  if (given.contains("tools")) conversation.tools = tools.dump();
  if (given.contains("variables")) conversation.variables = given["variables"].dump();
  conversation.continue_last_message = given.contains("continue_final_message");
  conversation.add_generation_prompt = answer;
  return conversation;
}

// Renders without the conversions of ChatTemplate, as the reference does.
std::string render_plainly(const jinja::Template& chat, const Conversation& conversation) {
  Dict variables = tokens();
  variables.set("documents", {});
  const std::string extra = conversation.variables.empty() ? "{}" : conversation.variables;
  const jinja::Value given = jinja::read_json(extra, "variables");
  for (const auto& [name, value] : given.dict()->entries()) variables.set(name, value);
  variables.set("messages", jinja::read_json(conversation.messages, "messages"));
  const std::string tools = conversation.tools.empty() ? "null" : conversation.tools;
  variables.set("tools", jinja::read_json(tools, "tools"));
  variables.set("add_generation_prompt", conversation.add_generation_prompt);
  return chat.render(variables);
}

// Returns nullopt if the template refuses the conversation.
template <typename Render>
std::optional<std::string> rendered(const Render& render) {
  try {
    return render();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
    return std::nullopt;
  }
}

TEST(ChatTemplate, WritesWhatTheReferenceWrites) {
  const ordered_json goldens = ordered_json::parse(read(kChat + "goldens.json"));
  const ordered_json given = ordered_json::parse(read(kChat + "conversations.json"));
  int compared = 0;
  for (const auto& [name, texts] : goldens.items()) {
    const std::string source = read(kChat + name + ".jinja");
    const auto plain = jinja::Template::parse(source, name);
    const ChatTemplate chat = ChatTemplate::parse(source, tokens(), name);
    for (const ordered_json& one : given["conversations"]) {
      SCOPED_TRACE(name + ", " + one["name"].get<std::string>());
      for (const bool answer : {false, true}) {
        Conversation conversation = conversation_of(one, given["tools"], answer);
        std::optional<std::string> got;
        if (conversation.continue_last_message) {
          conversation.add_generation_prompt = false;
          if (!answer) got = rendered([&] { return chat.render(conversation); });
        } else {
          got = rendered([&] { return render_plainly(plain, conversation); });
        }
        if (conversation.continue_last_message && answer) continue;
        const ordered_json& want = texts[one["name"].get<std::string>()][answer ? 1 : 0];
        ASSERT_EQ(got.has_value(), !want.is_null()) << got.value_or("");
        if (!got) continue;
        EXPECT_EQ(*got, with_dates(want));
        ++compared;
      }
    }
  }
  EXPECT_GT(goldens.size(), 40u);
  EXPECT_GT(compared, 1300);
}

TEST(ChatTemplate, GivesTemplatesWhatTheyExpect) {
  const auto text_of = [](const std::string& source, const Conversation& conversation) {
    return ChatTemplate::parse(source, tokens(), "test").render(conversation);
  };
  const std::string parts =
      R"([{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}])";
  EXPECT_EQ(text_of("{{ messages[0].content }}", {parts}), "a\nb");
  EXPECT_EQ(text_of("{% for p in messages[0]['content'] %}{{ p.text }};{% endfor %}", {parts}),
            "a;b;");
  const std::string calls = R"([{"role":"assistant","tool_calls":[{"function":{"name":"f",)"
                            R"("arguments":"{\"x\": [1]}"}}]}])";
  EXPECT_EQ(text_of("{{ messages[0].tool_calls[0].function.arguments.x[0] }}{{ messages[0].content "
                    "is none }}",
                    {calls}),
            "1True");
  EXPECT_EQ(text_of("{{ 'tool_calls' in messages[0] }}",
                    {R"([{"role":"user","content":"x","tool_calls":null}])"}),
            "False");
  const std::string user = R"([{"role":"user","content":"x"}])";
  EXPECT_EQ(text_of("{{ tools is none }}", {user, "[]"}), "True");
  EXPECT_EQ(text_of("{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}", {user}),
            "<s></s>False");
  EXPECT_EQ(text_of("{{ bos_token }}{{ k }}", {user, "", R"({"k": 2, "bos_token": "B"})"}), "B2");
}

TEST(ChatTemplate, NamesTheFieldThatIsWrong) {
  struct Case {
    Conversation conversation;
    std::string says;
  };
  const std::string user = R"([{"role":"user","content":"x"}])";
  const ChatTemplate chat = ChatTemplate::parse(
      "{% for m in messages %}{% if m.role == 'critic' %}\n{{ raise_exception('No critics!') }}"
      "{% endif %}{{ m.content }}{% endfor %}",
      {}, "test");
  for (const Case& wrong : std::vector<Case>{
           {{"["}, "messages: "},
           {{"{}"}, "messages is a dict, must be a list"},
           {{"[]"}, "messages has 0 entries"},
           {{"[3]"}, "messages[0] is a int"},
           {{R"([{"content":"x"}])"}, "messages[0] has no role"},
           {{R"([{"role":"user"}])"}, "messages[0] has no content"},
           {{R"([{"role":"user","content":3}])"}, "messages[0].content is a int"},
           {{R"([{"role":"user","content":[{"text":"x"}]}])"},
            "messages[0].content[0] has no type"},
           {{R"([{"role":"user","content":[{"type":"image_url"}]}])"}, "'image_url'"},
           {{R"([{"role":"user","content":[{"type":"text"}]}])"}, "content[0] has no text"},
           {{R"([{"role":"assistant","tool_calls":[{}]}])"}, "messages[0].tool_calls[0] has no"},
           {{R"([{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{"}}]}])"},
            "messages[0].tool_calls[0].function.arguments"},
           {{R"([{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"[]"}}]}])"},
            "must be an object"},
           {{R"([{"role":"user","content":"x"},{"role":"critic","content":"x"}])"},
            "test, line 2: No critics!"},
           {{R"([{"role":"user","content":"x","n":99999999999999999999}])"}, "beyond 64 bits"},
           {{"[" + std::string(70, '[')}, "nested deeper than 64"},
           {{user, "{}"}, "tools is a dict"},
           {{user, R"([{"type":"function"}])"}, "tools[0] has no function"},
           {{user, R"([{"function":{}}])"}, "tools[0].function has no name"},
           {{user, "", "[]"}, "variables is a list"},
           {{user, "", R"({"messages":[]})"}, "variables has 'messages'"},
           {{user, "", "", true, true}, "exclude each other"},
           {{R"([{"role":"user","content":null}])", "", "", false, true}, "no text to continue"}}) {
    SCOPED_TRACE(wrong.says);
    test::expect_invalid(wrong.says, [&] { (void)chat.render(wrong.conversation); });
  }
}

// The places where checkpoints keep their template, and their precedence.
TEST(ChatTemplate, FindsTheTemplateOfACheckpoint) {
  const fs::path folder =
      fs::temp_directory_path() / ("fovea_chat_template_test_" + std::to_string(getpid()));
  fs::create_directory(folder);
  const std::string gemma = read(kChat + "gemma.jinja"), chatml = read(kChat + "smollm2.jinja");
  const std::string mistral = read(kChat + "mistral_v0_1.jinja");
  struct Case {
    std::optional<std::string> config, own;
    std::string text;  // the text for "x", or part of the refusal
  };
  const std::string gemma_text = "<s><start_of_turn>user\nx<end_of_turn>\n<start_of_turn>model\n";
  const ordered_json list = {{{"name", "tool_use"}, {"template", "{{ bos_token }}{{ tools }}"}},
                             {{"name", "default"}, {"template", mistral}}};
  using json = ordered_json;
  for (const Case& place : std::vector<Case>{
           {json{{"chat_template", gemma}, {"bos_token", "<s>"}}.dump(), {}, gemma_text},
           {json{{"chat_template", gemma}, {"bos_token", {{"content", "<s>"}}}}.dump(),
            {},
            gemma_text},
           {json{{"chat_template", list}, {"bos_token", "<s>"}}.dump(), {}, "<s>[INST] x [/INST]"},
           {json{{"chat_template", chatml}, {"bos_token", "<s>"}}.dump(), gemma, gemma_text},
           {json{{"bos_token", "<s>"}}.dump(), mistral, "<s>[INST] x [/INST]"},
           {json{{"extra_special_tokens", {{"image_token", "<s>"}}}}.dump(), "{{ image_token }}",
            "<s>"},
           {json{{"chat_template", nullptr}}.dump(), {}, "has no chat template"},
           {json{{"chat_template", 7}}.dump(), {}, "has no chat template"},
           {"[]", {}, "has no chat template"},
           {"{", {}, "tokenizer_config.json"},
           {{}, "{% if %}", "chat_template.jinja, line 1: a value is missing"},
           {{}, {}, "has no chat template"}}) {
    SCOPED_TRACE(place.config.value_or("no config"));
    fs::remove(folder / "tokenizer_config.json");
    fs::remove(folder / "chat_template.jinja");
    if (place.config) std::ofstream(folder / "tokenizer_config.json") << *place.config;
    if (place.own) std::ofstream(folder / "chat_template.jinja") << *place.own;
    const ChatTemplate chat = ChatTemplate::open(folder.string());
    if (place.text.starts_with("<s>")) {
      EXPECT_EQ(chat.render(ChatPrompt{.user = "x"}), place.text);
    } else {
      test::expect_error(ErrorCode::unsupported, {folder.string(), place.text},
                         [&] { (void)chat.render(ChatPrompt{.user = "x"}); });
    }
  }
  std::ofstream(folder / "tokenizer_config.json") << json{{"chat_template", list}}.dump();
  fs::remove(folder / "chat_template.jinja");
  const ChatTemplate named = ChatTemplate::open(folder.string());
  const std::string user = R"([{"role":"user","content":"x"}])";
  EXPECT_EQ(named.render(Conversation{user, R"([{"function":{"name":"f"}}])"}),
            "[{'function': {'name': 'f'}}]");
  EXPECT_EQ(named.render(Conversation{user}), "[INST] x [/INST]");
  fs::remove_all(folder);
}

}  // namespace
}  // namespace fovea
