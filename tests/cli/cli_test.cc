// SPDX-License-Identifier: Apache-2.0
// The command line tool as a user runs it: what it prints, where, and how it ends.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/run_program.h"

namespace fovea::test {
namespace {

namespace fs = std::filesystem;

const std::string kModels = std::string(FOVEA_SOURCE_DIR) + "/testdata/models/";

ProgramResult fovea(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), FOVEA_CLI);
  return run_program(arguments);
}

// Bad input: exit code 2, one line on stderr, nothing on stdout.
void expect_refused(const ProgramResult& result, const std::vector<std::string>& mentions) {
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_EQ(result.out, "");
  for (const std::string& text : mentions) {
    EXPECT_NE(result.err.find(text), std::string::npos) << "no '" << text << "' in: " << result.err;
  }
}

void expect_one_line(const ProgramResult& result) {
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
}

// A copy of the llama checkpoint that a test may damage.
class DamagedModel {
 public:
  DamagedModel() {
    path_ = fs::temp_directory_path() / ("fovea_cli_test_" + std::to_string(getpid()));
    fs::remove_all(path_);
    fs::copy(kModels + "llama", path_);
  }
  ~DamagedModel() { fs::remove_all(path_); }
  std::string folder() const { return path_.string(); }
  fs::path file(const std::string& name) const { return path_ / name; }

  std::string read(const std::string& name) const {
    std::ifstream stream(file(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  void write(const std::string& name, const std::string& bytes) const {
    std::ofstream(file(name), std::ios::binary) << bytes;
  }
  // Replaces text of the safetensors header by text of the same length.
  void edit_header(const std::string& from, const std::string& to) const {
    ASSERT_EQ(from.size(), to.size());
    std::string bytes = read("model.safetensors");
    const size_t at = bytes.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    bytes.replace(at, from.size(), to);
    write("model.safetensors", bytes);
  }

 private:
  fs::path path_;
};

TEST(Cli, GeneratesTheReferenceText) {
  const nlohmann::json reference =
      nlohmann::json::parse(std::ifstream(kModels + "llama/reference.json"));
  const nlohmann::json& prompt = reference["prompts"][1];
  const ProgramResult result = fovea({"generate", kModels + "llama", "--prompt", prompt["text"],
                                      "--max-new-tokens", "64", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(nlohmann::json::parse(result.out)["text"], prompt["greedy_64"]);
}

TEST(Cli, StreamsTextToStdoutAndStatsToStderr) {
  const ProgramResult result =
      fovea({"generate", kModels + "llama", "-p", "And God said", "-n", "5", "--stats"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out.rfind("And God said", 0), 0u) << result.out;
  EXPECT_NE(result.err.find("tokens/s"), std::string::npos) << result.err;
}

TEST(Cli, StaysWithinItsMemory) {
  const size_t budget = 256 << 20;
  const ProgramResult result = fovea({"generate", kModels + "llama", "-p", "And God said", "-n",
                                      "200", "--kv-memory", std::to_string(budget)});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const size_t weights = fs::file_size(kModels + "llama/model.safetensors");
  EXPECT_LE(result.peak_rss_bytes, weights + budget + (200u << 20));
}

TEST(Cli, NamesTheDamagedTensor) {
  const DamagedModel model;
  const uintmax_t size = fs::file_size(model.file("model.safetensors"));
  fs::resize_file(model.file("model.safetensors"), size - 1000);
  const ProgramResult truncated = fovea({"generate", model.folder(), "-p", "x"});
  expect_refused(truncated, {"model.safetensors", "model.", "bytes"});
  expect_one_line(truncated);
}

TEST(Cli, NamesTheOverflowingTensor) {
  const DamagedModel model;
  model.edit_header("[2048,128]", "[2e9,2e99]");
  expect_refused(fovea({"generate", model.folder(), "-p", "x"}), {"model.embed_tokens.weight"});
}

TEST(Cli, ListsTheKnownArchitectures) {
  const DamagedModel model;
  nlohmann::json config = nlohmann::json::parse(model.read("config.json"));
  config["architectures"] = {"MambaForCausalLM"};
  model.write("config.json", config.dump());
  const ProgramResult result = fovea({"generate", model.folder(), "-p", "x"});
  expect_refused(result, {"MambaForCausalLM", "LlamaForCausalLM", "DeepseekV3ForCausalLM"});
  expect_one_line(result);
}

TEST(Cli, SaysBothLengthsOfATooLongPrompt) {
  std::string tokens = "5";
  for (int i = 1; i < 300; ++i) tokens += ",5";
  const ProgramResult result =
      fovea({"generate", kModels + "llama", "--tokens", tokens, "--max-context", "256", "-n", "4"});
  expect_refused(result, {"300", "256"});
  expect_one_line(result);
}

TEST(Cli, PrintsAllReasonsOfARequiredBackend) {
  expect_refused(fovea({"generate", kModels + "llama", "-p", "x", "--backend", "flash"}),
                 {"flash"});
  expect_refused(fovea({"generate", kModels + "llama", "-p", "x", "--backend", "nonsense"}),
                 {"nonsense", "cpu", "reference", "flash"});
}

TEST(Cli, RefusesWrongFlags) {
  expect_refused(fovea({"generate", kModels + "llama"}), {"--prompt"});
  expect_refused(fovea({"generate", "/nonexistent", "-p", "x"}), {"/nonexistent"});
  expect_refused(fovea({"generate", kModels + "llama", "-p", "x", "--kv-dtype", "int7"}),
                 {"--kv-dtype", "int7", "bf16"});
  expect_refused(fovea({"generate", kModels + "llama", "-p", "x", "--top-p", "1.5"}),
                 {"top_p", "1.5"});
  expect_refused(fovea({"generate", kModels + "llama", "-p", "x", "-n", "-1"}), {"-1"});
  expect_refused(fovea({"generate", kModels + "llama", "-p", "x", "--page-size", "0"}),
                 {"page_size", "0"});
  expect_refused(fovea({"generate", kModels + "llama", "-p", "x", "--kv-memory", "1kB"}),
                 {"KV budget", "1024"});
  expect_refused(fovea({"frobnicate"}), {"frobnicate", "generate"});
  expect_refused(fovea({"bench", "attention", "--q-len", "5"}), {"--kv-len"});
  expect_refused(fovea({"bench", "attention", "--device", "gpu"}), {"'gpu'", "cpu, cuda, cuda:N"});
  expect_refused(fovea({"bench", "attention", "--device", "cuda", "--filter", "nothing"}),
                 {"--filter"});
  expect_refused(fovea({"bench", "attention", "--device", "cuda", "--baselines", "/nowhere.csv"}),
                 {"/nowhere.csv"});
}

TEST(Cli, SaysInOneLineWhatTheParserRefuses) {
  struct Line {
    std::vector<std::string> arguments;
    std::string wrong, help;
  };
  for (const Line& line : std::vector<Line>{
           {{}, "subcommand", "fovea --help"},
           {{"generate"}, "model", "fovea generate --help"},
           {{"generate", kModels + "llama", "--bogus"}, "--bogus", "fovea generate --help"},
           {{"generate", "m", "--seed", "abc"}, "--seed = abc", "fovea generate --help"},
           {{"explain", "--require", "flash"}, "--require", "fovea explain --help"},
           {{"bench", "attention", "--phase", "x"}, "--phase: x", "fovea bench attention --help"},
       }) {
    const ProgramResult result = fovea(line.arguments);
    expect_refused(result, {"fovea: ", line.wrong, line.help});
    expect_one_line(result);
  }
}

TEST(Cli, TablesAndJson) {
  const ProgramResult environment = fovea({"env", "--json"});
  EXPECT_EQ(environment.exit_code, 0);
  EXPECT_TRUE(nlohmann::json::parse(environment.out).contains("processor"));
  const ProgramResult backends = fovea({"backends", "--json"});
  EXPECT_EQ(backends.exit_code, 0);
  EXPECT_GE(nlohmann::json::parse(backends.out).size(), 2u);
  const ProgramResult explain = fovea({"explain", "--window", "128", "--sinks", "--json"});
  EXPECT_EQ(explain.exit_code, 0) << explain.err;
  EXPECT_TRUE(nlohmann::json::parse(explain.out).contains("chosen"));
  EXPECT_EQ(fovea({"--help"}).exit_code, 0);
  EXPECT_EQ(fovea({"--version"}).exit_code, 0);
}

TEST(Cli, ChecksAModel) {
  const ProgramResult result = fovea({"check", kModels + "llama", "--backends", "cpu",
                                      "--kv-dtypes", "fp32,bf16", "--no-perplexity", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err << result.out;
  const nlohmann::json rows = nlohmann::json::parse(result.out);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_TRUE(rows[0]["pass"]);
  EXPECT_LT(rows[0]["max_logit_difference"], 2e-3);
}

TEST(Cli, BenchChecksWhatItTimes) {
  const ProgramResult result =
      fovea({"bench", "attention", "--kv-len", "300", "--batch", "2", "--head-dim", "64",
             "--seconds", "0.01", "--threads", "1", "-o", "json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const nlohmann::json row = nlohmann::json::parse(result.out)["results"][0];
  EXPECT_GT(row["seconds"], 0);
  EXPECT_LT(row["error"], 1e-3);
}

}  // namespace
}  // namespace fovea::test
