// SPDX-License-Identifier: Apache-2.0
#include "fovea/thread_pool.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "core/check.h"
#include "core/memory_error.h"
#include "fovea/device.h"

namespace fovea {
namespace {

constexpr int kMaxThreads = 1024;
// Number of polls before a worker sleeps. They last about as long as the gap between the kernels of
// two layers.
constexpr int kSpins = 2000;

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Number of forks between the process that loaded the library and this one. A child has one more
// than its parent, and none of its parent's threads.
std::atomic<int> forks{0};

int count_forks() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  check_argument(registered == 0, "pthread_atfork failed (error {})", registered);
  return forks.load(std::memory_order_relaxed);
}

// True while this thread runs a task.
thread_local bool in_task = false;

class TaskScope {
 public:
  TaskScope() { in_task = true; }
  ~TaskScope() { in_task = false; }
  TaskScope(const TaskScope&) = delete;
  TaskScope& operator=(const TaskScope&) = delete;
};

}  // namespace

struct ThreadPool::State {
  const int forks_before = count_forks();
  std::mutex one_at_a_time;

  // A job is published by raising `generation` after its fields are written. It is complete when
  // `running` returns to zero.
  const std::function<void(int64_t, int)>* task = nullptr;
  int64_t tasks = 0;
  std::atomic<int64_t> next{0};
  std::atomic<uint64_t> generation{0};
  std::atomic<int> running{0};
  std::atomic<bool> stop{false};

  std::mutex sleep_mutex;
  std::condition_variable wake;
  int sleepers = 0;

  std::mutex error_mutex;
  std::exception_ptr error;

  std::vector<std::thread> workers;

  bool is_forked() const { return forks.load(std::memory_order_relaxed) != forks_before; }

  // Stops the workers, even if not all of them could be started.
  ~State() {
    stop.store(true, std::memory_order_release);
    publish();
    for (std::thread& worker : workers) worker.join();
  }

  void run_tasks(int worker) {
    const TaskScope scope;
    for (;;) {
      const int64_t index = next.fetch_add(1, std::memory_order_relaxed);
      if (index >= tasks) return;
      try {
        (*task)(index, worker);
      } catch (...) {
        std::lock_guard lock(error_mutex);
        if (!error) error = std::current_exception();
        next.store(tasks, std::memory_order_relaxed);
      }
    }
  }

  void wait_for_job(uint64_t seen) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (generation.load(std::memory_order_acquire) != seen) return;
      pause_cpu();
    }
    std::unique_lock lock(sleep_mutex);
    ++sleepers;
    wake.wait(lock, [&] { return generation.load(std::memory_order_acquire) != seen; });
    --sleepers;
  }

  void work(int worker) {
    uint64_t seen = 0;
    for (;;) {
      wait_for_job(seen);
      ++seen;
      if (stop.load(std::memory_order_acquire)) return;
      run_tasks(worker);
      running.fetch_sub(1, std::memory_order_release);
    }
  }

  void publish() {
    {
      std::lock_guard lock(sleep_mutex);
      generation.fetch_add(1, std::memory_order_release);
      if (sleepers == 0) return;
    }
    wake.notify_all();
  }
};

ThreadPool::ThreadPool(int threads)
    : state_(
          name_memory([] { return std::make_unique<State>(); }, "a pool of {} threads", threads)) {
  check_argument(threads >= 0 && threads <= kMaxThreads, "threads is {}, must be in [0, {}]",
                 threads, kMaxThreads);
  if (threads == 0) threads = cpu_device().cores;
  const auto start = [&] {
    state_->workers.reserve(static_cast<size_t>(threads - 1));
    for (int worker = 1; worker < threads; ++worker) {
      state_->workers.emplace_back([state = state_.get(), worker] { state->work(worker); });
    }
  };
  try {
    name_memory(start, "a pool of {} threads", threads);
  } catch (const std::system_error& error) {
    fail(ErrorCode::out_of_memory, "threads is {}, the system lets {} run: {}", threads, size(),
         error.code().message());
  }
}

// A forked process has no workers to stop. Waiting for them, or for the threads that slept in the
// condition variable, would never end, so their state stays allocated.
ThreadPool::~ThreadPool() {
  if (state_->is_forked()) (void)state_.release();
}

int ThreadPool::size() const { return static_cast<int>(state_->workers.size()) + 1; }

void ThreadPool::run(int64_t tasks, const std::function<void(int64_t, int)>& task) {
  if (tasks <= 0) return;
  State& state = *state_;
  check_argument(!in_task, "parallel_for() of {} tasks inside a task would deadlock", tasks);
  check_argument(state.workers.empty() || !state.is_forked(),
                 "parallel_for() of {} tasks in a forked process, which has none of the pool's {} "
                 "threads: make a pool after fork()",
                 tasks, size());
  std::lock_guard lock(state.one_at_a_time);
  if (tasks == 1 || state.workers.empty()) {
    const TaskScope scope;
    for (int64_t index = 0; index < tasks; ++index) task(index, 0);
    return;
  }
  state.task = &task;
  state.tasks = tasks;
  state.error = nullptr;
  state.next.store(0, std::memory_order_relaxed);
  state.running.store(static_cast<int>(state.workers.size()), std::memory_order_relaxed);
  state.publish();
  state.run_tasks(0);
  for (int spin = 0; state.running.load(std::memory_order_acquire) != 0; ++spin) {
    spin < kSpins ? pause_cpu() : std::this_thread::yield();
  }
  if (state.error) std::rethrow_exception(state.error);
}

}  // namespace fovea
