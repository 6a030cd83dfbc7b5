// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of one process. A collective has three steps: every rank publishes its buffers
// and waits for the others; every rank copies or sums its share straight from their buffers; and
// every rank waits until nobody reads its buffers any longer. Only the first step can take long,
// and it alone has a timeout.
#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>

#include "core/check.h"
#include "core/rounding.h"
#include "dist/reduce.h"
#include "fovea/communicator.h"

namespace fovea {
namespace {

constexpr int kMaxRanks = 1024;

// A call as one rank has published it.
struct Call {
  std::string_view name;
  const void* send = nullptr;
  void* receive = nullptr;
  int64_t count = 0;  // elements of reductions, bytes of others
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
  int root = 0;

  bool agrees(const Call& other) const {
    return name == other.name && count == other.count && dtype == other.dtype && op == other.op &&
           root == other.root;
  }
  std::string describe() const {
    if (dtype == DType::u8) return fmt::format("{} of {} bytes, root {}", name, count, root);
    return fmt::format("{} of {} {} values, {}", name, count, dtype_name(dtype),
                       op == ReduceOp::sum ? "sum" : "max");
  }
};

class ThreadGroup {
 public:
  ThreadGroup(int ranks, const ThreadCommunicatorOptions& options)
      : options_(options),
        calls_(static_cast<size_t>(ranks)),
        present_(static_cast<size_t>(ranks)),
        left_(static_cast<size_t>(ranks)) {}

  int size() const { return static_cast<int>(calls_.size()); }
  const ThreadCommunicatorOptions& options() const { return options_; }
  // The calls of all ranks, unchanged between meet() and leave().
  const std::vector<Call>& calls() const { return calls_; }

  // Publishes the call and waits for all ranks.
  void meet(int rank, const Call& call) {
    std::unique_lock lock(mutex_);
    throw_if_failed();
    calls_[static_cast<size_t>(rank)] = call;
    present_[static_cast<size_t>(rank)] = true;
    fail_if_a_rank_left(call);
    if (++arrived_ == size()) {
      begin_copying();
      throw_if_failed();
      return;
    }
    const int64_t round = round_;
    const bool in_time = changed_.wait_for(lock, options_.timeout,
                                           [&] { return round_ != round || failure_.has_value(); });
    if (round_ != round) return;  // even if it fails later: others may read this rank's buffers
    if (!in_time)
      fail_all(fmt::format("{}: {} did not come within {} ms", call.name, absent(),
                           options_.timeout.count()));
    throw_if_failed();
  }

  // Waits until all ranks have copied.
  void leave() {
    std::unique_lock lock(mutex_);
    if (--copying_ == 0) {
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return copying_ == 0; });
    }
    throw_if_failed();
  }

  void abort(std::string_view reason) {
    const std::lock_guard lock(mutex_);
    fail_all(std::string(reason));
  }
  void check() {
    const std::lock_guard lock(mutex_);
    throw_if_failed();
  }
  // The rank's communicator is destroyed.
  void depart(int rank) {
    const std::lock_guard lock(mutex_);
    left_[static_cast<size_t>(rank)] = true;
    if (arrived_ > 0) fail_all(fmt::format("rank {} has left", rank));
  }

 private:
  void throw_if_failed() const {
    if (failure_) fail(ErrorCode::device_failure, "{}", *failure_);
  }
  void fail_all(std::string reason) {
    if (!failure_) failure_ = std::move(reason);
    changed_.notify_all();
  }
  void fail_if_a_rank_left(const Call& call) {
    const auto left = std::ranges::find(left_, true);
    if (left == left_.end()) return;
    fail_all(fmt::format("{}: rank {} has left", call.name, left - left_.begin()));
    throw_if_failed();
  }
  // Requires that all ranks have arrived. The copies of a round end before the next one begins.
  void begin_copying() {
    arrived_ = 0;
    present_.assign(present_.size(), false);
    for (size_t rank = 1; rank < calls_.size(); ++rank) {
      if (calls_[rank].agrees(calls_[0])) continue;
      fail_all(fmt::format("the ranks disagree: rank 0 called {}, rank {} called {}",
                           calls_[0].describe(), rank, calls_[rank].describe()));
      return;
    }
    ++round_;
    copying_ = size();
    changed_.notify_all();
  }
  std::string absent() const {
    std::string ranks;
    for (size_t rank = 0; rank < present_.size(); ++rank) {
      if (!present_[rank]) ranks += fmt::format("{}{}", ranks.empty() ? "rank " : ", ", rank);
    }
    return ranks;
  }

  const ThreadCommunicatorOptions options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Call> calls_;
  std::vector<bool> present_, left_;  // ranks that have arrived, ranks that are gone
  int arrived_ = 0, copying_ = 0;
  int64_t round_ = 0;
  std::optional<std::string> failure_;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(int rank, std::shared_ptr<ThreadGroup> group)
      : Communicator(rank, group->size()), group_(std::move(group)) {}
  ~ThreadCommunicator() override { group_->depart(rank()); }

  std::string_view name() const override { return "threads"; }
  void abort(std::string_view reason) override { group_->abort(reason); }
  void check() override { group_->check(); }

 protected:
  void run_all_reduce(const Reduction& call, Stream) override {
    run(published("all_reduce", call), [&](const std::vector<Call>& calls) {
      // Every rank reduces its share of the elements for all ranks.
      std::vector<void*> out;
      for (const Call& other : calls) out.push_back(other.receive);
      const int64_t share = ceil_div<int64_t>(call.count, size());
      const int64_t begin = std::min(call.count, rank() * share);
      const std::vector<const void*> in = inputs(calls, 0);
      reduce_ranks({in, out, call.dtype, call.op}, begin, std::min(call.count, begin + share));
    });
  }
  void run_reduce_scatter(const Reduction& call, Stream) override {
    run(published("reduce_scatter", call), [&](const std::vector<Call>& calls) {
      const size_t part = static_cast<size_t>(call.count) * dtype_bytes(call.dtype);
      const std::vector<const void*> in = inputs(calls, static_cast<size_t>(rank()) * part);
      reduce_ranks({in, {&call.receive, 1}, call.dtype, call.op}, 0, call.count);
    });
  }
  void run_all_gather(const Exchange& call, Stream) override {
    run(published("all_gather", call), [&](const std::vector<Call>& calls) {
      for (size_t r = 0; r < calls.size(); ++r) {
        char* const part = static_cast<char*>(call.receive) + r * call.bytes;
        if (call.bytes > 0 && calls[r].send != part) std::memcpy(part, calls[r].send, call.bytes);
      }
    });
  }
  void run_all_to_all(const Exchange& call, Stream) override {
    run(published("all_to_all", call), [&](const std::vector<Call>& calls) {
      for (size_t r = 0; call.bytes > 0 && r < calls.size(); ++r) {
        std::memcpy(
            static_cast<char*>(call.receive) + r * call.bytes,
            static_cast<const char*>(calls[r].send) + static_cast<size_t>(rank()) * call.bytes,
            call.bytes);
      }
    });
  }
  void run_broadcast(void* data, size_t bytes, int root, Stream) override {
    Call call = published("broadcast", Exchange{data, data, bytes});
    call.root = root;
    run(call, [&](const std::vector<Call>& calls) {
      if (bytes > 0 && root != rank()) {
        std::memcpy(data, calls[static_cast<size_t>(root)].send, bytes);
      }
    });
  }
  void run_barrier(Stream) override {
    run(published("barrier", Exchange{}), [](const std::vector<Call>&) {});
  }

 private:
  static Call published(std::string_view name, const Reduction& call) {
    return {name, call.send, call.receive, call.count, call.dtype, call.op, 0};
  }
  static Call published(std::string_view name, const Exchange& call) {
    Call published;
    published.name = name;
    published.send = call.send;
    published.receive = call.receive;
    published.count = static_cast<int64_t>(call.bytes);
    return published;
  }
  static std::vector<const void*> inputs(const std::vector<Call>& calls, size_t offset) {
    std::vector<const void*> in;
    for (const Call& call : calls) in.push_back(static_cast<const char*>(call.send) + offset);
    return in;
  }

  // Runs `copy` between the two meetings. Whatever it throws fails all ranks, after they have met.
  template <typename Copy>
  void run(const Call& call, const Copy& copy) {
    const int64_t number = number_++;
    try {
      if (group_->options().arrive) group_->options().arrive(rank(), number);
    } catch (const std::exception& error) {
      group_->abort(fmt::format("{}: rank {} failed: {}", call.name, rank(), error.what()));
      throw;
    }
    group_->meet(rank(), call);
    try {
      if (group_->options().copy) group_->options().copy(rank(), number);
      copy(group_->calls());
    } catch (const std::exception& error) {
      group_->abort(fmt::format("{}: rank {} failed: {}", call.name, rank(), error.what()));
    }
    group_->leave();
  }

  const std::shared_ptr<ThreadGroup> group_;
  int64_t number_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(
    int ranks, const ThreadCommunicatorOptions& options) {
  check_argument(ranks >= 1 && ranks <= kMaxRanks, "ranks is {}, must be in [1, {}]", ranks,
                 kMaxRanks);
  check_argument(options.timeout.count() >= 1, "timeout is {} ms, must be at least 1",
                 options.timeout.count());
  const auto group = std::make_shared<ThreadGroup>(ranks, options);
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int rank = 0; rank < ranks; ++rank) {
    communicators.push_back(std::make_unique<ThreadCommunicator>(rank, group));
  }
  return communicators;
}

}  // namespace fovea
