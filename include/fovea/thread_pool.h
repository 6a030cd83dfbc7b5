// SPDX-License-Identifier: Apache-2.0
// The threads that CPU kernels run on.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "fovea/api.h"

namespace FOVEA_API fovea {

// A fixed set of threads: the calling thread and size() - 1 workers. Tasks run on any worker, so
// results must not depend on the assignment. One parallel_for runs at a time; calls from several
// threads wait for each other.
// After fork() the child has no workers and must create its own pool.
class ThreadPool {
 public:
  // `threads` is in [0, 1024]; 0: one per core available to this process. Throws
  // Error{invalid_argument}, or Error{out_of_memory} naming the threads that the system allowed.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;

  // Runs task(index, worker) for every index in [0, tasks), with worker in [0, size()), and returns
  // when all have finished. Tasks start in ascending order, so put the longest first. The first
  // exception that a task throws is rethrown after all tasks have stopped. Allocates nothing; the
  // task is held by reference. Throws Error{invalid_argument} if called from a task of any pool or
  // in a forked process.
  template <typename Task>
  void parallel_for(int64_t tasks, const Task& task) {
    run(tasks, std::cref(task));
  }

 private:
  void run(int64_t tasks, const std::function<void(int64_t index, int worker)>& task);

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fovea
