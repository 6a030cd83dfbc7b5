// SPDX-License-Identifier: Apache-2.0
// Programs read this output: docs/json_output.md has every printed key, and every documented key is
// printed.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "cli/run_fovea.h"
#include "fovea/version.h"

namespace fovea::test {
namespace {

struct Keys {
  std::set<std::string> always, sometimes;
};

// Returns the keys of each section: the backquoted words in the first column of its tables, in
// italics if they are optional.
std::map<std::string, Keys> documented_keys() {
  std::ifstream document(std::string(FOVEA_SOURCE_DIR) + "/docs/json_output.md");
  const std::regex key(R"((\*?)`(\w+)`)");
  std::map<std::string, Keys> sections;
  std::string section;
  for (std::string line; std::getline(document, line);) {
    if (line.starts_with("## ")) section = line.substr(3);
    if (!line.starts_with("| ") || line.starts_with("| key")) continue;
    const std::string column = line.substr(0, line.find('|', 1));
    for (std::sregex_iterator found(column.begin(), column.end(), key), end; found != end;
         ++found) {
      Keys& keys = sections[section];
      ((*found)[1].length() > 0 ? keys.sometimes : keys.always).insert((*found)[2]);
    }
  }
  return sections;
}

void collect_keys(const nlohmann::json& json, std::set<std::string>& keys) {
  if (json.is_object()) {
    for (const auto& [key, value] : json.items()) keys.insert(key);
  }
  if (json.is_structured()) {
    for (const nlohmann::json& value : json) collect_keys(value, keys);
  }
}

TEST(CliJson, HasTheKeysThatAreDocumented) {
  const std::string llama = kModels + "llama";
  const std::vector<std::string> generate = {"generate", llama,    "-p", "And God", "-p",
                                             "In the",   "--json", "-n", "2"};
  std::vector<std::string> scored = generate;
  scored.insert(scored.end(), {"--logprobs", "1", "--prompt-logprobs"});
  const std::vector<std::pair<std::string, std::vector<std::string>>> commands = {
      {"`generate`", generate},
      {"`generate`", scored},
      {"`check`",
       {"check", llama, "--backends", "cpu,flash", "--kv-dtypes", "bf16", "--no-perplexity",
        "--json"}},
      {"`explain`", {"explain", "--json", "--backend", "prefer:flash"}},
      {"`explain`", {"explain", "--json", "--model", llama, "--decode-backend", "reference"}},
      {"`backends`", {"backends", "--json"}},
      {"`env`", {"env", "--json"}},
      {"`bench attention`",
       {"bench", "attention", "--kv-len", "16", "--seconds", "0.01", "--threads", "1", "-o",
        "json"}},
      {"`kernels list`, `report`, `build`", {"kernels", "list", "--json"}},
  };
  const std::map<std::string, Keys> sections = documented_keys();
  for (const auto& [section, command] : commands) {
    SCOPED_TRACE(section);
    const ProgramResult result = fovea(command);
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.err, "");
    std::vector<std::string> documents = {result.out};
    if (command.front() == "generate") {  // one document per line
      documents.clear();
      std::istringstream lines(result.out);
      for (std::string line; std::getline(lines, line);) documents.push_back(line);
      EXPECT_EQ(documents.size(), 2u);
    }
    const Keys& promised = sections.at(section);
    for (const std::string& document : documents) {
      std::set<std::string> keys;
      collect_keys(nlohmann::json::parse(document), keys);
      for (const std::string& key : keys) {
        EXPECT_TRUE(promised.always.contains(key) || promised.sometimes.contains(key))
            << key << " is not documented";
      }
      for (const std::string& key : promised.always) {
        EXPECT_TRUE(keys.contains(key)) << key << " is documented, but not printed";
      }
    }
  }
}

TEST(CliJson, AccompaniesTables) {
  const ProgramResult environment = fovea({"env", "--json"});
  EXPECT_EQ(environment.exit_code, 0);
  EXPECT_TRUE(nlohmann::json::parse(environment.out).contains("processor"));
  const ProgramResult backends = fovea({"backends", "--json"});
  EXPECT_EQ(backends.exit_code, 0);
  bool found = false;
  for (const auto& row : nlohmann::json::parse(backends.out)) {
    const bool missing = row.at("name") == "cudnn";
    found |= missing;
    if (!missing && row.at("name") != "cpu") continue;
    EXPECT_EQ(row.at("why_not_built"), missing ? "this build has no such backend yet" : "");
  }
  EXPECT_TRUE(found);
  const std::string table = fovea({"backends"}).out;
  const size_t others = table.find("not in this build:");
  ASSERT_NE(others, std::string::npos) << table;
  EXPECT_LT(table.find("`reference`"), others);
  EXPECT_GT(table.find("`cudnn`"), others);
  const ProgramResult explain = fovea({"explain", "--window", "128", "--sinks", "--json"});
  EXPECT_EQ(explain.exit_code, 0) << explain.err;
  EXPECT_TRUE(nlohmann::json::parse(explain.out).contains("chosen"));
  // Without a pack and a compiler of kernels no backend serves a GPU.
  const ProgramResult ampere = fovea({"explain", "--device", "sm_80", "--json"});
  if (ampere.exit_code == 0) {
    const std::string fallback = nlohmann::json::parse(ampere.out).at("fallback");
    EXPECT_TRUE(fallback.starts_with("portable serves instead of flash: device")) << fallback;
  }
  const ProgramResult model = fovea({"explain", "--model", kModels + "gemma2", "--json"});
  EXPECT_EQ(model.exit_code, 0) << model.err;
  EXPECT_EQ(nlohmann::json::parse(model.out).at("groups").at(1).at("chosen"), "cpu");
  EXPECT_EQ(fovea({"--help"}).exit_code, 0);
  EXPECT_EQ(fovea({"--version"}).out, fmt::format("fovea {}.{}.{}\n", FOVEA_VERSION_MAJOR,
                                                  FOVEA_VERSION_MINOR, FOVEA_VERSION_PATCH));
}

}  // namespace
}  // namespace fovea::test
