// SPDX-License-Identifier: Apache-2.0
// `fovea kernels`: lists, builds once, reports.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "cli/run_fovea.h"

namespace fovea::test {
namespace {

TEST(Cli, ListsTheKernelsAndNamesAMissingPack) {
  const ProgramResult result = fovea({"kernels", "list", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  std::set<std::string> names, families;
  for (const nlohmann::json& kernel : nlohmann::json::parse(result.out)) {
    EXPECT_TRUE(names.insert(kernel["name"]).second) << kernel["name"];
    families.insert(kernel["family"]);
  }
  for (const char* family : {"sm90/decode", "sm90/prefill", "sm90/mla_decode", "portable/attention",
                             "portable/mla_decode"}) {
    EXPECT_TRUE(families.contains(family)) << family;
  }
  for (const char* what : {"list", "report"}) {
    expect_refused(fovea({"kernels", what, "--pack", "/nowhere/kernels.pack"}),
                   {"/nowhere/kernels.pack"});
  }
}

TEST(Cli, NamesAFileThatIsNotAPack) {
  const std::string folder = ::testing::TempDir() + "cli_packs_" + std::to_string(getpid());
  std::filesystem::create_directory(folder);
  const std::string text = folder + "/text.pack", nowhere = folder + "/none/kernels.pack";
  std::ofstream(text) << "no kernels in here";
  for (const std::string& pack : {text, nowhere}) {
    const ProgramResult environment =
        run_program({"/usr/bin/env", "FOVEA_KERNEL_PACK=" + pack, FOVEA_CLI, "env", "--json"});
    EXPECT_EQ(environment.exit_code, 0) << environment.err;
    const std::string said = nlohmann::json::parse(environment.out)["kernel_pack"];
    EXPECT_TRUE(said.starts_with(pack + ": ")) << said;
    expect_refused(fovea({"kernels", "build", "--pack", pack, "--only", "measure/empty"}),
                   {pack + ": "});
  }
  expect_refused(
      fovea({"kernels", "build", "--pack", folder + "/new.pack", "--only", "frobnicate"}),
      {"only is 'frobnicate'"});
  EXPECT_FALSE(std::filesystem::exists(folder + "/new.pack"));
  std::filesystem::remove_all(folder);
}

// Needs NVRTC but no GPU. Without NVRTC the command prints the reason.
TEST(Cli, BuildsKernelsOnceAndReportsThem) {
  const std::string pack = ::testing::TempDir() + "cli_test_" + std::to_string(getpid()) + ".pack";
  const std::vector<std::string> build = {"kernels", "build",         "--pack", pack,
                                          "--only",  "measure/empty", "--json"};
  const nlohmann::json environment = nlohmann::json::parse(fovea({"env", "--json"}).out);
  const std::string compiler = environment["kernel_compiler"];
  if (!compiler.starts_with("NVRTC ")) {
    expect_refused(fovea(build), {compiler});
    return;
  }
  const auto bytes = [&] {
    std::ifstream file(pack, std::ios::binary);
    return std::string{std::istreambuf_iterator<char>(file), {}};
  };
  const ProgramResult first = fovea(build);
  ASSERT_EQ(first.exit_code, 0) << first.err;
  // stderr is a file here: the progress consists of whole lines, for the first kernel and for the
  // last.
  EXPECT_TRUE(first.err.starts_with("[1/")) << first.err;
  const size_t last = first.err.rfind("\n[") + 1;
  const size_t total = first.err.find('/') + 1;
  const std::string kernels = first.err.substr(total, first.err.find(']') - total);
  EXPECT_TRUE(first.err.substr(last).starts_with("[" + kernels + "/" + kernels + "] measure/empty"))
      << first.err;
  EXPECT_TRUE(first.err.ends_with(" s\n")) << first.err;
  EXPECT_EQ(first.err.find('\r'), std::string::npos);
  const std::string built = bytes();
  const ProgramResult second = fovea(build);
  ASSERT_EQ(second.exit_code, 0);
  EXPECT_EQ(second.err, "");
  EXPECT_EQ(bytes(), built) << "compiled existing kernels again";  // compilation times are in it
  const ProgramResult report = fovea({"kernels", "report", "--json", "--pack", pack});
  int packed = 0;
  for (const nlohmann::json& kernel : nlohmann::json::parse(report.out)) {
    if (!kernel["packed"]) continue;
    ++packed;
    EXPECT_EQ(kernel["family"], "measure/empty");
    EXPECT_GT(kernel["registers"], 0);
    EXPECT_GT(kernel["cubin_bytes"], 0);
    EXPECT_EQ(kernel["spill_bytes"], 0);
  }
  EXPECT_GT(packed, 0);

  // As if the assembler had reported it.
  std::string noted = built;
  const std::string nothing = "losses=\n", note = "losses=(C7510) serialized\n";
  noted.replace(noted.find(nothing), nothing.size(), note);
  uint64_t index_bytes = 0;
  std::memcpy(&index_bytes, &noted[8], sizeof(index_bytes));
  index_bytes += note.size() - nothing.size();
  std::memcpy(&noted[8], &index_bytes, sizeof(index_bytes));
  std::ofstream(pack, std::ios::binary) << noted;
  const ProgramResult refused = fovea(build);
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_NE(refused.err.find("measure/empty"), std::string::npos) << refused.err;
  EXPECT_NE(refused.err.find("(C7510) serialized"), std::string::npos) << refused.err;
  std::filesystem::remove(pack);
}

// explain() reads key tiles from compiled kernels and compiles none itself.
TEST(Cli, ExplainsPromptsOfCompiledKernels) {
  const nlohmann::json environment = nlohmann::json::parse(fovea({"env", "--json"}).out);
  if (!environment["kernel_compiler"].get<std::string>().starts_with("NVRTC "))
    GTEST_SKIP() << "nothing compiles here";
  const std::string pack = ::testing::TempDir() + "cli_test_" + std::to_string(getpid()) + ".pack";
  const std::vector<std::string> explain = {"explain",      "--device",     "sm_90",
                                            "--max-tokens", "4096",         "--max-q-len",
                                            "4096",         "--max-kv-len", "8192"};
  const char* const before = std::getenv("FOVEA_KERNEL_PACK");
  const std::string kept = before == nullptr ? "" : before;
  for (const char* kernel : {"sm90/prefill/128_128_bf16_pages_plain_whole",
                             "sm90/prefill/128_128_bf16_pairs_plain_whole"}) {
    const ProgramResult built = fovea({"kernels", "build", "--pack", pack, "--only", kernel});
    ASSERT_EQ(built.exit_code, 0) << built.err;
  }
  setenv("FOVEA_KERNEL_PACK", pack.c_str(), 1);
  const ProgramResult result = fovea(explain);
  if (before == nullptr) {
    unsetenv("FOVEA_KERNEL_PACK");
  } else {
    setenv("FOVEA_KERNEL_PACK", kept.c_str(), 1);
  }
  std::filesystem::remove(pack);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("4096 new tokens of 4096 keys: pairs of blocks, "
                            "4096 new tokens of 8192 keys: pairs of blocks"),
            std::string::npos)
      << result.out;
}

TEST(Cli, KeepsWhatCompiledWhenInterrupted) {
  const nlohmann::json environment = nlohmann::json::parse(fovea({"env", "--json"}).out);
  if (!environment["kernel_compiler"].get<std::string>().starts_with("NVRTC "))
    GTEST_SKIP() << "nothing compiles here";
  const std::string pack = ::testing::TempDir() + "cli_test_" + std::to_string(getpid()) + ".pack";
  for (const int signal : {SIGINT, SIGTERM}) {
    const ProgramResult result = interrupt_program(
        {FOVEA_CLI, "kernels", "build", "--pack", pack, "--only", "_plan", "--threads", "1"},
        signal, 0);
    EXPECT_EQ(result.exit_code, 128 + signal);
    EXPECT_TRUE(result.err.starts_with("[1/")) << result.err;
    int packed = 0, missing = 0;
    for (const nlohmann::json& kernel :
         nlohmann::json::parse(fovea({"kernels", "list", "--json", "--pack", pack}).out)) {
      const bool chosen = kernel["name"].get<std::string>().find("_plan") != std::string::npos;
      if (chosen) kernel["packed"] ? ++packed : ++missing;
    }
    EXPECT_EQ(packed, signal == SIGINT ? 1 : 2);
    EXPECT_GT(missing, 0);
  }
  std::filesystem::remove(pack);
}

}  // namespace
}  // namespace fovea::test
