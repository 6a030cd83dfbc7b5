// SPDX-License-Identifier: Apache-2.0
// The threads the CPU kernels run on.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace fovea {

// A fixed team: the calling thread and size()-1 workers. Which worker runs which task is not
// specified, so results must not depend on it (the kernels' do not). One parallel_for at a time;
// calls from several threads wait for each other. A process that fork() made has no workers: it
// makes a pool of its own.
class ThreadPool {
 public:
  // In [0, 1024], else Error{invalid_argument}; 0: one per core available to this process.
  // Error{out_of_memory} says how many threads the system lets run.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;

  // Runs task(index, worker) for every index in [0, tasks), worker in [0, size()), and returns when
  // all have finished. Tasks are handed out in ascending order, so put the heaviest first. The
  // first exception thrown by a task is rethrown here after the others have stopped. Allocates
  // nothing: the task is held by reference, whatever it captures. Throws Error{invalid_argument}
  // from inside a task, of this pool or of another, and in a forked process.
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
