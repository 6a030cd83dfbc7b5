// SPDX-License-Identifier: Apache-2.0
// A model on processes that MPI joins: mpiexec -n 2 engine_mpi_ranks. Every process is a rank and
// must generate the reference's text.
//
// With --killed or --stopped, rank 1 gets that signal while it generates, and every request of the
// others must be answered (lose_a_rank.sh).
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "engine/reference_text.h"
#include "engine/small_engine.h"
#include "fovea/engine_service.h"
#include "fovea/error.h"
#include "fovea/mpi_communicator.h"
#include "fovea/parallel_engine.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

std::unique_ptr<Communicator> world;

EngineOptions options_for(const char* model) {
  EngineOptions options = small_options(model);
  options.max_context = 1024;
  options.max_requests = 8;
  options.max_batch_tokens = 256;
  return options;
}

TEST(ProcessesAsRanks, GenerateTheReferenceText) {
  for (const char* const model : {"llama", "gpt_oss"}) {
    for (const bool share_contexts : {false, true}) {
      const auto engine = load_engine_rank(options_for(model), *world, share_contexts);
      const std::vector<ReferencePrompt> all = read_reference(model);
      std::vector<GenerateRequest> requests;
      for (const ReferencePrompt& prompt : all) requests.push_back(greedy_request(prompt));
      const std::vector<GenerateResult> results = engine->generate(requests);
      for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(results[i].tokens, all[i].greedy) << model;
    }
  }
}

TEST(ProcessesAsRanks, NeedTheSameMemory) {
  EngineOptions options = options_for("llama");
  options.kv_memory_bytes = 0;
  test::expect_invalid("kv_memory_bytes is 0", [&] { load_engine_rank(options, *world, false); });
}

constexpr std::chrono::seconds kTimeout{2}, kMaxWait{10};
constexpr int32_t kRequests = 4;
constexpr int kVictim = 1;

// The answers that the requests of a service have got.
struct Answers {
  std::atomic<int> tokens = 0, all = 0, failed = 0;

  void add(const TokenEvent& event) {
    ++tokens;
    if (event.finish == FinishReason::none) return;
    if (event.finish == FinishReason::failed && !event.error.empty()) ++failed;
    ++all;
  }
};

std::vector<pid_t> processes_of(Communicator& ranks) {
  const pid_t own = getpid();
  std::vector<pid_t> processes(static_cast<size_t>(ranks.size()));
  ranks.all_gather(&own, processes.data(), sizeof(own));
  return processes;
}

void wait_for(const std::atomic<int>& count, int wanted) {
  const auto end = std::chrono::steady_clock::now() + kMaxWait;
  while (count < wanted && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

// Rank 1 gets the signal after some tokens. Prints a line for every other rank whose requests were
// answered in time: nothing of mpiexec's exit code says so.
void lose_a_rank(int signal) {
  const auto ranks = make_mpi_communicator(MPI_COMM_WORLD, kTimeout);
  const std::vector<pid_t> processes = processes_of(*ranks);
  Answers answers;
  auto engine = load_engine_rank(options_for("llama"), *ranks, false);
  const int32_t max_tokens = engine->max_context() / 2;
  EngineService service(std::move(engine), {.max_running = kRequests});
  std::vector<ServiceRequest> requests;
  for (int32_t i = 0; i < kRequests; ++i) {
    requests.push_back(
        {.request = text_request(kPrompt, max_tokens), .on_event = [&](TokenEvent event) {
           answers.add(event);
           if (ranks->rank() == kVictim && answers.tokens == 20) raise(signal);
         }});
  }
  service.add(std::move(requests));
  wait_for(answers.tokens, 1);
  const auto begin = std::chrono::steady_clock::now();
  wait_for(answers.all, kRequests);
  const auto waited = std::chrono::steady_clock::now() - begin;
  std::printf("rank %d: %d of %d requests failed, %d answered, %s\n", ranks->rank(),
              answers.failed.load(), kRequests, answers.all.load(),
              waited < kMaxWait ? "in time" : "too late");
  std::fflush(stdout);
  std::this_thread::sleep_for(kTimeout);  // until the other ranks have printed
  if (ranks->rank() == 0) kill(processes[kVictim], SIGKILL);
  std::_Exit(0);  // MPI_Finalize() would wait
}

}  // namespace
}  // namespace fovea

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  int threads = MPI_THREAD_SINGLE;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &threads);
  const std::string_view mode = argc > 1 ? argv[1] : "";
  if (mode == "--killed") fovea::lose_a_rank(SIGKILL);
  if (mode == "--stopped") fovea::lose_a_rank(SIGSTOP);
  fovea::world = fovea::make_mpi_communicator(MPI_COMM_WORLD);
  const int result = RUN_ALL_TESTS();
  fovea::world.reset();
  MPI_Finalize();
  return result;
}
