// SPDX-License-Identifier: Apache-2.0
// Ranks that are two processes with a GPU each, on one machine. Skipped where there are fewer GPUs.
#include "fovea/process_ranks.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "fovea/parallel_engine.h"
#include "gpu/exact_text.h"
#include "gpu/several_gpus.h"
#include "support/run_program.h"

namespace fovea {
namespace {

constexpr const char* kFile = "FOVEA_TEST_RENDEZVOUS";

// The other process is this program, with this test alone.
TEST(ProcessesWithGpus, FollowRankZero) {
  const char* const file = getenv(kFile);
  if (file == nullptr) GTEST_SKIP() << "there is no rank 0";
  RankProcesses ranks(meet_by_file({.file = file, .rank = 1, .ranks = 2}));
  ranks.follow("cuda");
}

struct Case {
  const char* model;
  int32_t contexts = 1;
  bool experts = false;
};

void expect_reference(const Case& given, RankProcesses& ranks) {
  SCOPED_TRACE(given.model);
  ExactText exact(given.model);
  EngineOptions options = gpu_options(given.model);
  options.kv_memory_bytes *= 2;
  const auto engine = load_parallel_engine(options, {.tensor_parallel = 2,
                                                     .context_parallel = given.contexts,
                                                     .expert_parallel = given.experts,
                                                     .processes = &ranks});
  EXPECT_NE(engine->explain().find("by writes into peers' memory"), std::string::npos)
      << engine->explain();
  exact.expect_reference(*engine);
}

TEST(ProcessesWithGpus, ContinueTheReferencePrompts) {
  FOVEA_NEEDS_GPUS(2);
  std::string folder = std::filesystem::temp_directory_path() / "fovea_processes_XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const std::string file = folder + "/file";
  setenv(kFile, file.c_str(), 1);
  unsetenv("GTEST_TOTAL_SHARDS");  // the other process has one test, whatever shard this one is
  test::ProgramResult other;
  std::thread follower([&] {
    other = test::run_program({"/proc/self/exe", "--gtest_filter=*.FollowRankZero"});
  });
  try {
    RankProcesses ranks(meet_by_file({.file = file, .rank = 0, .ranks = 2}));
    for (const Case& each :
         {Case{"llama"}, Case{"llama", 2}, Case{"deepseek_v3", 2}, Case{"gpt_oss", 1, true}}) {
      expect_reference(each, ranks);
    }
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  follower.join();
  EXPECT_EQ(other.exit_code, 0) << other.out << other.err;
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace fovea
