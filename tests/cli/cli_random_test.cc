// SPDX-License-Identifier: Apache-2.0
// Models without weights on the command line, prompts without text, and steps with drafts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/run_fovea.h"

namespace fovea::test {
namespace {

TEST(Cli, SpeculationChangesNoTextAndHasStats) {
  std::vector<std::string> command = {"generate", kModels + "llama", "-p", "And God said", "-n",
                                      "80",       "--ignore-eos"};
  const ProgramResult plain = fovea(command);
  command.insert(command.end(), {"--stats", "--speculate", "ngram", "--always-speculate"});
  const ProgramResult drafted = fovea(command);
  EXPECT_EQ(drafted.exit_code, 0) << drafted.err;
  EXPECT_EQ(drafted.out, plain.out);
  EXPECT_NE(drafted.err.find("speculation: "), std::string::npos) << drafted.err;
  EXPECT_NE(drafted.err.find(" % accepted; "), std::string::npos) << drafted.err;
  command[command.size() - 2] = "guess";
  EXPECT_EQ(fovea(command).exit_code, 2);
}

TEST(Cli, RunsAConfigWithRandomWeights) {
  const auto run = [](const std::string& seed, const std::string& prompts) {
    const ProgramResult result =
        fovea({"generate", kModels + "llama/config.json", "--random-weights", seed,
               "--random-prompts", prompts, "-n", "4", "--ignore-eos", "--json"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.out;
  };
  const std::string two = run("7", "2x5");
  EXPECT_EQ(std::count(two.begin(), two.end(), '\n'), 2);
  const nlohmann::json first = nlohmann::json::parse(two.substr(0, two.find('\n')));
  EXPECT_EQ(first["prompt_tokens"], 5);
  EXPECT_EQ(first["tokens"].size(), 4u);
  EXPECT_EQ(first["text"], "");
  EXPECT_EQ(run("7", "2x5"), two);
  EXPECT_EQ(run("7", "5"), two.substr(0, two.find('\n') + 1));
  EXPECT_NE(run("8", "2x5"), two);

  const std::string config = kModels + "llama/config.json";
  expect_refused(fovea({"generate", config, "--tokens", "1"}), {"--random-weights SEED"});
  expect_refused(fovea({"explain", "--model", config}), {"--random-weights SEED"});
  expect_refused(fovea({"explain", "--random-weights", "1"}), {"--random-weights needs --model"});
  for (const char* prompts : {"0x5", "2x", "x5", "-1x5", "2x5x5", "2x99999999999", ""}) {
    expect_refused(
        fovea({"generate", config, "--random-weights", "1", "--random-prompts", prompts}),
        {"--random-prompts is '" + std::string(prompts) + "'", "8x512"});
  }
  expect_refused(fovea({"generate", config, "--random-weights", "1", "--random-prompts", "9999"}),
                 {"--random-prompts is '9999'", "8192"});
  expect_refused(fovea({"generate", config, "--random-weights", "-1", "--tokens", "1"}),
                 {"--random-weights", "-1", "whole number"});
  expect_refused(fovea({"generate", config, "--random-weights", "1", "-p", "x"}),
                 {"no tokenizer", "tokenizer.json"});
}

TEST(Cli, TimesAModelWithoutFiles) {
  const auto bench = [](const std::string& requests, const std::string& input_len,
                        const std::string& output) {
    return fovea({"bench", "engine", kModels + "llama/config.json", "--random-weights", "7",
                  "--requests", requests, "--input-len", input_len, "--output-len", "4", "-o",
                  output});
  };
  const ProgramResult json = bench("3", "5", "json");
  ASSERT_EQ(json.exit_code, 0) << json.err;
  const nlohmann::json figures = nlohmann::json::parse(json.out);
  EXPECT_EQ(figures.at("requests"), 3);
  EXPECT_GT(figures.at("first_token_p50_ms"), 0);
  EXPECT_LE(figures.at("first_token_p50_ms"), figures.at("first_token_p99_ms"));
  EXPECT_LE(figures.at("between_tokens_p50_ms"), figures.at("between_tokens_p99_ms"));
  EXPECT_GT(figures.at("output_tokens_per_s"), 0);
  EXPECT_EQ(figures.at("steps"), 4);
  EXPECT_GT(figures.at("decode_step_p50_ms"), 0);
  EXPECT_EQ(figures.at("mixed_steps"), 0);
  EXPECT_TRUE(figures.at("mixed_step_p50_ms").is_null());
  EXPECT_GT(figures.at("host_step_p50_us"), 0);
  EXPECT_GE(figures.at("device_idle_share"), 0);
  EXPECT_LT(figures.at("device_idle_share"), 1);
  EXPECT_NE(json.err.find("memory: weights"), std::string::npos) << json.err;
  const std::string csv = bench("3", "5", "csv").out;
  EXPECT_EQ(csv.substr(0, csv.find(',')), "ranks");
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 2);
  expect_refused(bench("3", "9999", "md"), {"--input-len is 9999", "8192"});
  expect_refused(bench("0", "5", "md"), {"--requests"});
}

// The second prompt ends in the step in which the first request has its second token.
TEST(Cli, TimesStepsOfDecodesAndPrompts) {
  std::vector<std::string> command = {"bench",
                                      "engine",
                                      kModels + "llama/config.json",
                                      "--random-weights",
                                      "7",
                                      "--requests",
                                      "2",
                                      "--input-len",
                                      "9",
                                      "--output-len",
                                      "4",
                                      "--max-batch-tokens",
                                      "8",
                                      "-o",
                                      "json"};
  const ProgramResult result = fovea(command);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const nlohmann::json figures = nlohmann::json::parse(result.out);
  EXPECT_EQ(figures.at("mixed_steps"), 1);
  EXPECT_GT(figures.at("mixed_step_p50_ms"), 0);
  command.insert(command.end(), {"--max-mixed-tokens", "9"});
  expect_refused(fovea(command), {"max_mixed_tokens is 9", "[0, 8]"});
}

TEST(Cli, TimesRequestsThatArriveOneByOne) {
  const std::string trace = ::testing::TempDir() + "fovea_steps.json";
  std::vector<std::string> command = {"bench",
                                      "engine",
                                      kModels + "llama/config.json",
                                      "--random-weights",
                                      "7",
                                      "--requests",
                                      "12",
                                      "--input-len",
                                      "9",
                                      "--output-len",
                                      "4",
                                      "--rate",
                                      "200",
                                      "--length-sigma",
                                      "0.8",
                                      "--max-requests",
                                      "2",
                                      "--overlap",
                                      "--trace",
                                      trace,
                                      "-o",
                                      "json"};
  const ProgramResult result = fovea(command);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const nlohmann::json figures = nlohmann::json::parse(result.out);
  EXPECT_EQ(figures.at("rate"), 200);
  EXPECT_GT(figures.at("overlapped_steps"), 0);
  EXPECT_GT(figures.at("steps"), figures.at("overlapped_steps"));
  std::ifstream file(trace);
  const nlohmann::json events = nlohmann::json::parse(file).at("traceEvents");
  std::map<std::string, int64_t> counts;
  for (const nlohmann::json& event : events) {
    if (event.at("ph") == "X" && event.at("tid") == 1) ++counts[event.at("name")];
    if (event.at("ph") == "X") {
      EXPECT_GE(event.at("dur"), 0) << event;
    }
  }
  for (const char* phase : {"schedule", "enqueue", "wait", "deliver"}) {
    EXPECT_EQ(counts[phase], figures.at("steps")) << phase;
  }
  command.back() = "md";
  EXPECT_NE(fovea(command).out.find("| host_step_p50_us | "), std::string::npos);
  command[19] = "/nowhere/steps.json";
  expect_refused(fovea(command), {"--trace /nowhere/steps.json", "No such file"});
  command[19] = trace;
  command[12] = "nan";
  expect_refused(fovea(command), {"--rate is nan"});
}

// No weights are generated, so models too large for any machine take no longer than others.
TEST(Cli, SaysWhatAModelOfRealSizeTakes) {
  const std::string shape = std::string(FOVEA_SOURCE_DIR) + "/testdata/shapes/qwen3_8b.json";
  const std::vector<std::string> explain = {"explain", "--model",     shape, "--random-weights",
                                            "1",       "--kv-memory", "8GB"};
  const ProgramResult text = fovea(explain);
  ASSERT_EQ(text.exit_code, 0) << text.err;
  EXPECT_NE(text.out.find("\nmemory: weights 16"), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("MB, together "), std::string::npos) << text.out;
  std::vector<std::string> as_json = explain;
  as_json.push_back("--json");
  const nlohmann::json memory = nlohmann::json::parse(fovea(as_json).out).at("memory");
  size_t sum = 0;
  for (const auto& [part, bytes] : memory.items()) {
    if (part != "total") sum += bytes.get<size_t>();
  }
  EXPECT_EQ(memory.at("total"), sum);
  EXPECT_LE(memory.at("caches"), size_t{8} << 30);
}

}  // namespace
}  // namespace fovea::test
