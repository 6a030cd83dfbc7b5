// SPDX-License-Identifier: Apache-2.0
#include "engine/rank_threads.h"

#include <chrono>
#include <system_error>

#include "core/check.h"

namespace fovea {

RankThreads::RankThreads(int ranks, bool spin) : spins_(spin), thrown_(static_cast<size_t>(ranks)) {
  try {
    for (int rank = 1; rank < ranks; ++rank) threads_.emplace_back([this, rank] { serve(rank); });
  } catch (const std::system_error&) {
    const size_t started = threads_.size();
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    fail(ErrorCode::out_of_memory, "the system allowed {} of {} threads for ranks", started,
         ranks - 1);
  }
}

RankThreads::~RankThreads() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void RankThreads::run(const std::function<void(int rank)>& body) {
  {
    const std::lock_guard lock(mutex_);
    body_ = &body;
    running_ = size() - 1;
    thrown_.assign(thrown_.size(), nullptr);
    ++round_;
  }
  changed_.notify_all();
  std::exception_ptr thrown;
  try {
    body(0);
  } catch (...) {
    thrown = std::current_exception();
  }
  spin_until([&] { return running_.load() == 0; });
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return running_ == 0; });
  if (thrown) std::rethrow_exception(thrown);
  for (const std::exception_ptr& other : thrown_) {
    if (other) std::rethrow_exception(other);
  }
}

template <typename Condition>
void RankThreads::spin_until(const Condition& condition) const {
  using Clock = std::chrono::steady_clock;
  if (!spins_) return;
  const Clock::time_point end = Clock::now() + std::chrono::milliseconds(1);
  while (!condition() && Clock::now() < end) continue;
}

void RankThreads::serve(int rank) {
  int64_t served = 0;
  while (true) {
    spin_until([&] { return round_.load() != served; });
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stopping_ || round_ != served; });
    if (stopping_) return;
    served = round_;
    lock.unlock();
    std::exception_ptr thrown;
    try {
      (*body_)(rank);
    } catch (...) {
      thrown = std::current_exception();
    }
    lock.lock();
    thrown_[static_cast<size_t>(rank)] = thrown;
    if (--running_ == 0) changed_.notify_all();
  }
}

}  // namespace fovea
