// SPDX-License-Identifier: Apache-2.0
// Models on several ranks by the command line tool.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/run_fovea.h"

namespace fovea::test {
namespace {

TEST(Cli, RanksGenerateTheReferenceText) {
  const nlohmann::json reference =
      nlohmann::json::parse(std::ifstream(kModels + "llama/reference.json"));
  const nlohmann::json& prompt = reference["prompts"][1];
  const std::vector<std::string> command = {
      "generate", kModels + "llama", "--prompt", prompt["text"], "-n", "64", "--json", "--tp"};
  std::vector<std::string> two = command, three = command;
  two.push_back("2");
  three.push_back("3");
  const ProgramResult result = fovea(two);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(nlohmann::json::parse(result.out)["text"], prompt["greedy_64"]);
  for (const char* const word : {"--dcp", "2"}) two.emplace_back(word);
  const ProgramResult distributed = fovea(two);
  ASSERT_EQ(distributed.exit_code, 0) << distributed.err;
  EXPECT_EQ(nlohmann::json::parse(distributed.out)["text"], prompt["greedy_64"]);
  const ProgramResult refused = fovea(three);
  EXPECT_NE(refused.exit_code, 0);
  EXPECT_NE(refused.err.find("can be divided among 1, 2, 4"), std::string::npos) << refused.err;
}

TEST(Cli, ExplainsOneOfSeveralRanks) {
  const auto explain = [](const std::vector<std::string>& flags) {
    std::vector<std::string> command = {"explain",  "--json", "--model",     kModels + "qwen3",
                                        "--device", "sm_90",  "--kv-memory", "64MB"};
    command.insert(command.end(), flags.begin(), flags.end());
    const ProgramResult result = fovea(command);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return nlohmann::json::parse(result.out);
  };
  const nlohmann::json whole = explain({}), rank = explain({"--tp", "2"});
  EXPECT_EQ(rank["ranks"], 2);
  EXPECT_LT(rank["memory"]["weights"], whole["memory"]["weights"]);
  const ProgramResult refused = fovea({"explain", "--tp", "2"});
  EXPECT_NE(refused.err.find("--tp needs --model"), std::string::npos) << refused.err;
}

TEST(Cli, RefusesRanksOnGpusThatAreNotThere) {
  const ProgramResult result = fovea({"bench", "ranks", "--ranks", "64"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find("ranks is 64, there are "), std::string::npos) << result.err;
}

}  // namespace
}  // namespace fovea::test
