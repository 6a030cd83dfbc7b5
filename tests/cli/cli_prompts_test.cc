// SPDX-License-Identifier: Apache-2.0
// The prompts of `generate`: several of them, from flags and files, and one that fails.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "cli/run_fovea.h"

namespace fovea::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// A folder for one test. The destructor removes it.
class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / ("fovea_prompts_test_" + std::to_string(getpid()))) {
    fs::create_directory(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  std::string file(const std::string& name, const std::string& bytes) const {
    std::ofstream(path_ / name, std::ios::binary) << bytes;
    return (path_ / name).string();
  }
  std::string path() const { return path_.string(); }

 private:
  fs::path path_;
};

ProgramResult generate(const std::string& model, std::vector<std::string> flags) {
  flags.insert(flags.begin(), {"generate", model, "-n", "4"});
  return fovea(flags);
}

ProgramResult generate(const std::vector<std::string>& flags) {
  return generate(kModels + "llama", flags);
}

std::vector<json> json_lines(const std::string& text) {
  std::vector<json> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(json::parse(line));
  return lines;
}

// Runs the prompts one after another, each in a process of its own.
std::string alone(const std::vector<std::vector<std::string>>& prompts) {
  std::string lines;
  for (std::vector<std::string> flags : prompts) {
    flags.push_back("--json");
    lines += generate(flags).out;
  }
  return lines;
}

TEST(CliPrompts, TokensRepeatedAreABatch) {
  const ProgramResult both =
      generate({"--tokens", "13,269,260", "--tokens", "5", "--json", "-p", "And God said"});
  EXPECT_EQ(both.exit_code, 0) << both.err;
  EXPECT_EQ(both.out,
            alone({{"-p", "And God said"}, {"--tokens", "13,269,260"}, {"--tokens", "5"}}));
  const ProgramResult text = generate({"--tokens", "13,269,260", "--tokens", "5"});
  EXPECT_TRUE(text.out.starts_with("[0] ")) << text.out;
  EXPECT_NE(text.out.find("\n[1] "), std::string::npos) << text.out;
}

// Empty lines are ignored, with any kind of line end.
TEST(CliPrompts, AFileHasOneOnEachLine) {
  const std::vector<std::vector<std::string>> prompts = {
      {"-p", "And God said"}, {"-p", " "}, {"-p", "In the d\xC3\xA4ys"}};
  const std::string want = alone(prompts);
  const Folder folder;
  for (const std::string text :
       {"And God said\n \nIn the d\xC3\xA4ys\n", "\n\nAnd God said\n\n \nIn the d\xC3\xA4ys",
        "And God said\r\n \r\n\r\nIn the d\xC3\xA4ys\r\n\r\n",
        "\xEF\xBB\xBF"
        "And God said\r\n \r\nIn the d\xC3\xA4ys"}) {
    const std::string file = folder.file("prompts", text);
    const ProgramResult result = generate({"--prompts", file, "--json"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.out, want) << text;
    EXPECT_EQ(run_program({"/bin/sh", "-c",
                           "'" FOVEA_CLI "' generate -n 4 --json --prompts - '" + kModels +
                               "llama' < '" + file + "'"})
                  .out,
              want);
  }
}

TEST(CliPrompts, EveryWayOfGivingThemKeepsItsOrder) {
  const Folder folder;
  const std::string lines = folder.file("lines", "one\ntwo\n"),
                    whole = folder.file("whole", "a\nb");
  const ProgramResult all = generate(
      {"--tokens", "7", "--prompts", lines, "--prompt-file", whole, "-p", "first", "--json"});
  EXPECT_EQ(
      all.out,
      alone({{"-p", "first"}, {"-p", "a\nb"}, {"-p", "one"}, {"-p", "two"}, {"--tokens", "7"}}));
}

TEST(CliPrompts, RefusesFilesByNameAndLine) {
  const Folder folder;
  struct Refusal {
    std::vector<std::string> flags;
    std::vector<std::string> mentions;
  };
  const std::string latin = folder.file("latin",
                                        "good\n\nb\xE4"
                                        "d\n");
  const std::string cut = folder.file("cut", "good\r\n\xE2\x82\r\n");
  const std::string surrogate = folder.file("surrogate", "\xED\xA0\x80");
  const std::string empty = folder.file("empty", ""), blank = folder.file("blank", "\n\r\n\n");
  for (const Refusal& refusal : std::vector<Refusal>{
           {{"--prompts", latin}, {latin + ": line 3 is not UTF-8"}},
           {{"--prompts", cut}, {cut + ": line 2 is not UTF-8"}},
           {{"--prompts", surrogate}, {surrogate + ": line 1 is not UTF-8"}},
           {{"--prompts", empty}, {empty, "no line contains a prompt"}},
           {{"--prompts", blank}, {blank, "no line contains a prompt"}},
           {{"--prompts", folder.path()}, {"--prompts " + folder.path(), "directory"}},
           {{"--prompts", "/nonexistent"}, {"--prompts /nonexistent: No such file"}},
           {{"--prompts", ""}, {"--prompts"}},
           {{"--prompts", "-", "--prompt-file", "-"}, {"--prompt-file", "--prompts", "one"}},
           {{"--tokens", "1,2", "--tokens", "3,x"}, {"--tokens", "3,x"}},
           {{"--tokens", "1,2", "--tokens", ""}, {"--tokens", "'' has an empty entry"}},
           {{"--chat", "-p", "x"}, {kModels + "llama: has no chat template"}},
           {{"--chat", "--tokens", "1,2"}, {"--chat", "--tokens"}},
           {{"--system", "x", "-p", "x"}, {"--system needs --chat"}},
           {{"--tokens", "1", "--tokens", "4096"}, {"request 2 of 2", "token 0 is 4096"}},
       }) {
    const ProgramResult result = generate(refusal.flags);
    expect_refused(result, refusal.mentions);
    expect_one_line(result);
  }
}

// The template's text surrounds them but is not printed.
TEST(CliPrompts, ChatsAreInTheFormatOfTheTemplate) {
  const Folder folder;
  for (const char* name : {"config.json", "tokenizer.json", "model.safetensors"})
    fs::create_symlink(kModels + "llama/" + name, folder.path() + "/" + name);
  fs::copy(FOVEA_SOURCE_DIR "/testdata/chat/smollm2.jinja", folder.path() + "/chat_template.jinja");
  const std::string default_system =
      "You are a helpful AI assistant named SmolLM, trained by Hugging Face";
  for (const std::string system : {"", "Be brief."}) {
    std::vector<std::string> raw, chat = {"--chat"};
    if (!system.empty()) chat.insert(chat.end(), {"--system", system});
    for (const std::string user : {"And God said", "In the beginning\n"}) {
      raw.insert(raw.end(),
                 {"-p", "<|im_start|>system\n" + (system.empty() ? default_system : system) +
                            "<|im_end|>\n<|im_start|>user\n" + user +
                            "<|im_end|>\n<|im_start|>assistant\n"});
      chat.insert(chat.end(), {"-p", user});
    }
    const ProgramResult text = generate(folder.path(), chat);
    raw.push_back("--json");
    chat.push_back("--json");
    const ProgramResult want = generate(folder.path(), raw);
    EXPECT_EQ(generate(folder.path(), chat).out, want.out);
    const std::vector<json> lines = json_lines(want.out);
    ASSERT_EQ(lines.size(), 2u) << want.err;
    EXPECT_EQ(text.out, "[0] " + lines[0].at("text").get<std::string>() + "\n[1] " +
                            lines[1].at("text").get<std::string>() + "\n");
  }
}

// A copy of the gpt_oss checkpoint. Prompts with token 300 give logits that are NaN.
class NanModel {
 public:
  NanModel() {
    const std::string source = kModels + "gpt_oss/";
    for (const char* name : {"config.json", "tokenizer.json"})
      fs::copy(source + name, folder_.path());
    std::ifstream file(source + "model.safetensors", std::ios::binary);
    std::string bytes{std::istreambuf_iterator<char>(file), {}};
    uint64_t header = 0;
    std::memcpy(&header, bytes.data(), sizeof(header));
    const json tensor =
        json::parse(bytes.substr(sizeof(header), header)).at("model.embed_tokens.weight");
    EXPECT_EQ(tensor.at("dtype"), "BF16");
    const size_t row_bytes = tensor.at("shape").at(1).get<size_t>() * 2;
    const size_t row =
        sizeof(header) + header + tensor.at("data_offsets").at(0).get<size_t>() + 300 * row_bytes;
    std::fill_n(bytes.begin() + static_cast<int64_t>(row), row_bytes, '\x7F');  // 0x7F7F: NaN
    for (size_t i = 0; i < row_bytes; i += 2) bytes[row + i] = '\xFF';
    folder_.file("model.safetensors", bytes);
  }
  std::string folder() const { return folder_.path(); }

 private:
  Folder folder_;
};

TEST(CliPrompts, OneThatFailsEndsNoOther) {
  const NanModel model;
  const std::vector<std::string> good = {"--tokens", "5,6,7"}, bad = {"--tokens", "5,300,7"};
  const ProgramResult want = generate(model.folder(), {"--tokens", "5,6,7", "--json"});
  EXPECT_EQ(want.exit_code, 0) << want.err;

  std::vector<std::string> batch = good;
  batch.insert(batch.end(), bad.begin(), bad.end());
  batch.insert(batch.end(), good.begin(), good.end());
  const ProgramResult text = generate(model.folder(), batch);
  EXPECT_EQ(text.exit_code, 1);
  EXPECT_NE(text.err.find("fovea: prompt 2 of 3: the logit of token 0 is NaN"), std::string::npos)
      << text.err;
  expect_one_line(text);
  const std::string generated = json::parse(want.out).at("text");
  EXPECT_EQ(text.out, "[0] " + generated + "\n[1] \n[2] " + generated + "\n");

  batch.push_back("--json");
  const ProgramResult result = generate(model.folder(), batch);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.err, text.err);
  const std::vector<json> lines = json_lines(result.out);
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0].at("tokens"), json::parse(want.out).at("tokens"));
  EXPECT_FALSE(lines[0].contains("error"));
  EXPECT_EQ(lines[1].at("finish_reason"), "failed");
  EXPECT_EQ(lines[1].at("error"), "the logit of token 0 is NaN");
  EXPECT_EQ(lines[1].at("prompt_tokens"), 3);
  EXPECT_EQ(lines[1].at("tokens"), json::array());
  EXPECT_EQ(lines[2].at("tokens"), lines[0].at("tokens"));

  const ProgramResult single = generate(model.folder(), bad);
  EXPECT_EQ(single.exit_code, 1);
  EXPECT_EQ(single.out, "\n");
  EXPECT_EQ(single.err, "fovea: prompt 1 of 1: the logit of token 0 is NaN\n");
}

}  // namespace
}  // namespace fovea::test
