// SPDX-License-Identifier: Apache-2.0
// The threads of the ranks of one process.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace fovea {

// Rank 0 runs on the calling thread, the others on threads that live as long as this object.
class RankThreads {
 public:
  // Threads that spin begin and end a run sooner, and take their core for a millisecond after it.
  explicit RankThreads(int ranks, bool spin = false);
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  int size() const { return static_cast<int>(threads_.size()) + 1; }
  // Runs body(rank) on every rank's thread and returns when all have finished. Rethrows the
  // exception of the lowest rank that threw.
  void run(const std::function<void(int rank)>& body);

 private:
  void serve(int rank);
  template <typename Condition>
  void spin_until(const Condition& condition) const;

  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<void(int)>* body_ = nullptr;  // argument of the current run()
  // Written with the mutex; spinning threads read them without.
  std::atomic<int64_t> round_ = 0;
  std::atomic<int> running_ = 0;
  bool stopping_ = false;
  const bool spins_;
  std::vector<std::exception_ptr> thrown_;  // [ranks]
  std::vector<std::thread> threads_;
};

}  // namespace fovea
