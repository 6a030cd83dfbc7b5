// SPDX-License-Identifier: Apache-2.0
// `fovea bench attention` on the CPU: its documents, its rounds, and the correctness of the results
// it times.
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "cli/run_fovea.h"

namespace fovea::test {
namespace {

TEST(Cli, BenchChecksWhatItTimes) {
  for (const char* dtype : {"fp32", "fp16", "bf16"}) {
    const ProgramResult result = fovea({"bench", "attention", "--kv-len", "300", "--batch", "2",
                                        "--head-dim", "64", "--seconds", "0.01", "--threads", "1",
                                        "--dtype", dtype, "--kv-dtype", dtype, "-o", "json"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const nlohmann::json row = nlohmann::json::parse(result.out)["results"][0];
    EXPECT_GT(row["seconds"], 0);
    EXPECT_LT(row["error"], 5e-3) << dtype;
  }
}

TEST(Cli, OneDocumentForAllThreadCounts) {
  std::vector<std::string> command = {"bench", "attention", "--kv-len", "64", "--seconds",
                                      "0.01",  "--threads", "1,2",      "-o"};
  command.push_back("json");
  const ProgramResult json = fovea(command);
  ASSERT_EQ(json.exit_code, 0) << json.err;
  const nlohmann::json rows = nlohmann::json::parse(json.out)["results"];
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[1]["threads"], 2);
  for (const nlohmann::json& row : rows) {
    for (const char* key : {"fraction", "peak_flops", "peak_read_bytes"}) EXPECT_GT(row[key], 0);
  }
  command.back() = "csv";
  const std::string csv = fovea(command).out;
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 3) << csv;
  for (const char* column : {",fraction,", ",peak_gflops,", ",peak_gbytes\n"})
    EXPECT_NE(csv.find(column), std::string::npos) << csv;
  command.back() = "md";
  const std::string table = fovea(command).out;
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 2 + 4) << table;
  for (const char* column : {"| of ceiling |", "| FMA GFLOP/s |", "| read GB/s |", " read |"})
    EXPECT_NE(table.find(column), std::string::npos) << table;
}

// The caller writes the second line after it has read the first answer: an answer must not wait for
// the next request.
TEST(Cli, BenchTakesTurnsWithItsCaller) {
  const ProgramResult result =
      run_program({"/bin/sh", "-ec",
                   R"(dir=$(mktemp -d); trap 'rm -r "$dir"' EXIT; mkfifo "$dir/in" "$dir/out"
          timeout 1800 "$0" bench attention --kv-len 64 --threads 1 --turns -o json \
              <"$dir/in" >"$dir/out" &
          exec 3>"$dir/in" 4<"$dir/out"
          for turn in 1 2; do echo >&3; read -r seconds <&4; echo "$seconds"; done
          exec 3>&-; cat <&4)",
                   FOVEA_CLI});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  std::istringstream out(result.out);
  double first = 0, second = 0;
  out >> first >> second;
  EXPECT_GT(first, 0);
  EXPECT_GT(second, 0);
  const nlohmann::json row = nlohmann::json::parse(out)["results"][0];
  EXPECT_LE(row["seconds_min"], std::min(first, second) * (1 + 1e-6));
  // The median of all calls lies between the medians of the rounds.
  EXPECT_GE(row["seconds"], std::min(first, second) * (1 - 1e-6));
  EXPECT_LE(row["seconds"], std::max(first, second) * (1 + 1e-6));
}

TEST(Cli, BenchPrintsTheCasesItHasTimedWhenInterrupted) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const ProgramResult result = interrupt_program(
        {FOVEA_CLI, "bench", "attention", "--quick", "--seconds", "0.01", "-o", "json"}, signal, 0);
    EXPECT_EQ(result.exit_code, 128 + signal);
    EXPECT_EQ(result.err, "");
    EXPECT_EQ(nlohmann::json::parse(result.out)["results"].size(), 1u) << result.out;
  }
}

}  // namespace
}  // namespace fovea::test
