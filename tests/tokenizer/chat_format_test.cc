// SPDX-License-Identifier: Apache-2.0
// Chats compared with those that the PyPI package `transformers` renders, stored in testdata/chat
// by tools/make_chat_goldens.py; and refused templates.
#include "tokenizer/chat_format.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const std::string kChat = FOVEA_SOURCE_DIR "/testdata/chat/";

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%d %b %Y", std::localtime(&now));
  return text.data();
}

std::vector<ChatPrompt> prompts(const json& goldens) {
  std::vector<ChatPrompt> prompts;
  for (const json& prompt : goldens.at("prompts")) {
    ChatPrompt& read = prompts.emplace_back();
    read.user = prompt.at("user");
    if (!prompt.at("system").is_null()) read.system = prompt.at("system").get<std::string>();
  }
  return prompts;
}

// Models whose format is not supported.
const std::map<std::string, std::string> kRefused = {{"phi3", "Phi-3"}, {"deepseekv3", "DeepSeek"}};

TEST(ChatFormat, WritesWhatTheReferenceWrites) {
  const json goldens = json::parse(read(kChat + "goldens.json"));
  const std::vector<ChatPrompt> given = prompts(goldens);
  int compared = 0;
  for (const auto& [name, texts] : goldens.at("texts").items()) {
    SCOPED_TRACE(name);
    const ChatFormat format = ChatFormat::parse(read(kChat + name + ".jinja"), "<s>", name);
    ASSERT_EQ(texts.size(), given.size());
    for (size_t i = 0; i < given.size(); ++i) {
      const auto render = [&] { (void)format.render(given[i]); };
      if (kRefused.contains(name)) {
        test::expect_error(ErrorCode::unsupported, {name, kRefused.at(name)}, render);
      } else if (texts[i].is_null()) {
        test::expect_error(ErrorCode::invalid_argument, "no system message", render);
      } else {
        std::string want = texts[i];
        const std::string date = "{today}";
        if (const size_t at = want.find(date); at != want.npos)
          want.replace(at, date.size(), today());
        EXPECT_EQ(format.render(given[i]), want);
        ++compared;
      }
    }
  }
  EXPECT_GT(compared, 40);
}

TEST(ChatFormat, RefusesTemplatesThatMayWriteSomethingElse) {
  const std::string chatml = read(kChat + "smollm2.jinja");
  const std::string system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face";
  const auto changed = [](std::string text, const std::string& from, const std::string& to) {
    const size_t at = text.find(from);
    EXPECT_NE(at, text.npos) << from;
    return text.replace(at, from.size(), to);
  };
  struct Case {
    std::string source, says;
  };
  for (const Case& refused : std::vector<Case>{
           {"{{ messages[0]['content'] }}", "no known format"},
           {std::string(1'000'001, ' '), "1000001 bytes"},
           {changed(chatml, "assistant\n'", "assistant\n<think>\n'"), "thoughts"},
           {changed(chatml, "message['content']", "message['content'] | trim"), "more than"},
           {changed(chatml, system, "It\\'s you"), "unknown default system message"},
           {changed(chatml, "'<|im_start|>assistant\n'", "'<|im_start|>model\n'"), "answer"},
           {"{{ bos_token }}" + chatml, "no bos_token"},
           {"{{ '<<SYS>>' }}[INST] [/INST]", "Llama 2"},
           {"{{ '[INST]' + message['content'].strip() + '[/INST]' }}", "more to a message"},
           {"[INST] [/INST]", "as Mistral does"},
           {"{{ '<|start_header_id|>' }}", "as Llama 3 does"},
           {"{{ '<start_of_turn>' }}", "as Gemma does"}}) {
    SCOPED_TRACE(refused.source.substr(0, 200));
    const ChatFormat format = ChatFormat::parse(refused.source, "", "the template");
    const std::string said =
        test::error_of([&] { (void)format.render({.user = "x"}); }, ErrorCode::unsupported);
    EXPECT_NE(said.find(refused.says), said.npos) << "no '" << refused.says << "' in: " << said;
    EXPECT_EQ(said.find('\n'), said.npos) << said;
    EXPECT_LT(said.size(), 400u) << said;
  }
}

// The places where checkpoints keep their template, and their precedence.
TEST(ChatFormat, FindsTheTemplateOfACheckpoint) {
  const fs::path folder =
      fs::temp_directory_path() / ("fovea_chat_format_test_" + std::to_string(getpid()));
  fs::create_directory(folder);
  const std::string gemma = read(kChat + "gemma.jinja"), chatml = read(kChat + "smollm2.jinja");
  const std::string mistral = read(kChat + "mistral_v0_1.jinja");
  struct Case {
    std::optional<std::string> config, own;
    std::string text;  // the text for "x", or part of the refusal
  };
  const std::string gemma_text = "<s><start_of_turn>user\nx<end_of_turn>\n<start_of_turn>model\n";
  const json list = {{{"name", "tool_use"}, {"template", chatml}},
                     {{"name", "default"}, {"template", mistral}}};
  for (const Case& place : std::vector<Case>{
           {json{{"chat_template", gemma}, {"bos_token", "<s>"}}.dump(), {}, gemma_text},
           {json{{"chat_template", gemma}, {"bos_token", {{"content", "<s>"}}}}.dump(),
            {},
            gemma_text},
           {json{{"chat_template", list}, {"bos_token", "<s>"}}.dump(), {}, "<s>[INST] x [/INST]"},
           {json{{"chat_template", chatml}, {"bos_token", "<s>"}}.dump(), gemma, gemma_text},
           {json{{"bos_token", "<s>"}}.dump(), mistral, "<s>[INST] x [/INST]"},
           {json{{"chat_template", gemma}, {"bos_token", nullptr}}.dump(), {}, "no bos_token"},
           {json{{"chat_template", nullptr}}.dump(), {}, "has no chat template"},
           {json{{"chat_template", 7}}.dump(), {}, "has no chat template"},
           {"[]", {}, "has no chat template"},
           {"{", {}, "tokenizer_config.json"},
           {{}, {}, "has no chat template"}}) {
    SCOPED_TRACE(place.config.value_or("no config"));
    fs::remove(folder / "tokenizer_config.json");
    fs::remove(folder / "chat_template.jinja");
    if (place.config) std::ofstream(folder / "tokenizer_config.json") << *place.config;
    if (place.own) std::ofstream(folder / "chat_template.jinja") << *place.own;
    const ChatFormat format = ChatFormat::open(folder.string());
    if (place.text.starts_with("<s>")) {
      EXPECT_EQ(format.render({.user = "x"}), place.text);
    } else {
      test::expect_error(ErrorCode::unsupported, {folder.string(), place.text},
                         [&] { (void)format.render({.user = "x"}); });
    }
  }
  fs::remove_all(folder);
}

}  // namespace
}  // namespace fovea
