// SPDX-License-Identifier: Apache-2.0
// Runs the ranks of a test on threads of their own.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "fovea/communicator.h"

namespace fovea::test {

using RankBody = std::function<void(Communicator&)>;

// Runs `body` on every communicator, each on its own thread, and returns what each threw.
inline std::vector<std::exception_ptr> run_ranks(
    const std::vector<std::unique_ptr<Communicator>>& ranks, const RankBody& body) {
  std::vector<std::exception_ptr> thrown(ranks.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(*ranks[rank]);
      } catch (...) {
        thrown[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return thrown;
}

// Runs them and rethrows the first exception.
inline void run_all_ranks(int ranks, const RankBody& body,
                          const ThreadCommunicatorOptions& options = {}) {
  for (const auto& thrown : run_ranks(make_thread_communicators(ranks, options), body)) {
    if (thrown) std::rethrow_exception(thrown);
  }
}

}  // namespace fovea::test
