// SPDX-License-Identifier: Apache-2.0
#include "fovea/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fovea/error.h"
#include "support/address_space_limit.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

TEST(ThreadPool, RunsEveryTaskOnce) {
  for (const int size : {1, 2, 3, 8}) {
    ThreadPool threads(size);
    EXPECT_EQ(threads.size(), size);
    for (const int64_t tasks : {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{7}, int64_t{1000}}) {
      std::vector<int> runs(static_cast<size_t>(tasks));
      threads.parallel_for(tasks, [&](int64_t index, int worker) {
        EXPECT_GE(worker, 0);
        EXPECT_LT(worker, size);
        ++runs[static_cast<size_t>(index)];
      });
      for (const int count : runs) EXPECT_EQ(count, 1);
    }
  }
}

// Many short jobs, some of them after the workers fell asleep: no job may see the previous one.
TEST(ThreadPool, JobsDoNotOverlap) {
  ThreadPool threads(4);
  int64_t total = 0;
  for (int job = 0; job < 2000; ++job) {
    std::atomic<int64_t> sum{0};
    threads.parallel_for(9, [&](int64_t index, int) { sum += index + job; });
    total += sum - 36 - 9 * job;
    if (job % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_EQ(total, 0);
}

TEST(ThreadPool, CallersWaitForEachOther) {
  ThreadPool threads(2);
  std::atomic<int64_t> sum{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int job = 0; job < 50; ++job)
        threads.parallel_for(10, [&](int64_t i, int) { sum += i; });
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum, 4 * 50 * 45);
}

TEST(ThreadPool, RethrowsTheFirstException) {
  for (const int size : {1, 3}) {
    ThreadPool threads(size);
    EXPECT_THROW(threads.parallel_for(100,
                                      [](int64_t i, int) {
                                        if (i == 5) throw std::runtime_error("five");
                                      }),
                 std::runtime_error);
    std::atomic<int> after{0};
    threads.parallel_for(3, [&](int64_t, int) { ++after; });
    EXPECT_EQ(after, 3);
  }
}

// A task that starts tasks would wait for itself, also in a pool of one thread and in another
// pool's tasks.
TEST(ThreadPool, TasksStartNoTasks) {
  for (const int size : {1, 3}) {
    ThreadPool threads(size), others(2);
    for (ThreadPool* inner : {&threads, &others}) {
      for (const int64_t tasks : {1, 2}) {
        test::expect_invalid("parallel_for() of 2 tasks inside a task", [&] {
          threads.parallel_for(tasks,
                               [&](int64_t, int) { inner->parallel_for(2, [](int64_t, int) {}); });
        });
      }
    }
    std::atomic<int> after{0};
    threads.parallel_for(3, [&](int64_t, int) { ++after; });
    others.parallel_for(3, [&](int64_t, int) { ++after; });
    EXPECT_EQ(after, 6);
  }
}

// Returns the exit code of `action` in a forked process, or 99 if it has not ended after some
// seconds.
template <typename Action>
int forked(const Action& action) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(action());
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 99;
}

TEST(ThreadPool, AForkedProcessHasNoWorkers) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer lets no thread start after a fork";
#endif
  auto threads = std::make_unique<ThreadPool>(3);
  ThreadPool alone(1);
  std::atomic<int> runs{0};
  const auto count = [&](int64_t, int) { ++runs; };
  threads->parallel_for(2, count);
  for (const bool asleep : {false, true}) {
    if (asleep) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_EQ(forked([&] {
                try {
                  threads->parallel_for(2, count);
                } catch (const Error& error) {
                  const std::string said = error.what();
                  return said.find("in a forked process") != std::string::npos ? 7 : 8;
                }
                return 9;
              }),
              7);
    EXPECT_EQ(forked([&] {
                threads.reset();  // does not wait for missing workers
                alone.parallel_for(2, count);
                ThreadPool own(2);
                own.parallel_for(2, count);
                return 5;
              }),
              5);
  }
  threads->parallel_for(2, count);
  EXPECT_EQ(runs, 4);
}

TEST(ThreadPool, RefusesSenselessSizes) {
  EXPECT_THROW(ThreadPool(-1), Error);
  EXPECT_THROW(ThreadPool(1 << 20), Error);
  EXPECT_GE(ThreadPool(0).size(), 1);
}

TEST(ThreadPool, SaysWhenNotAllThreadsCanStart) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer maps more than any limit";
#endif
  std::string said;
  {
    const test::AddressSpaceLimit limit(256 << 20);  // stacks of 8 MB
    try {
      ThreadPool threads(1024);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::out_of_memory);
      said = error.what();
    }
  }
  EXPECT_TRUE(said.starts_with("threads is 1024, the system lets ")) << said;
}

}  // namespace
}  // namespace fovea
