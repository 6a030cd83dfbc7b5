// SPDX-License-Identifier: Apache-2.0
#include "dist/socket_communicator.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "core/check.h"
#include "dist/reduce.h"

namespace fovea {
namespace {

enum class Call : uint32_t { failure, all_reduce, all_gather, all_to_all, broadcast, barrier };
constexpr const char* kNames[] = {"failure",    "all_reduce", "all_gather",
                                  "all_to_all", "broadcast",  "barrier"};
constexpr size_t kMaxReason = 4096;

// Precedes the bytes of a call, or the reason of a failure.
struct Head {
  Call call = Call::failure;
  uint32_t detail = 0;  // dtype and operator, or the root
  uint64_t bytes = 0;
  bool operator==(const Head&) const = default;

  std::string describe() const {
    const auto index = static_cast<size_t>(call);
    return fmt::format("{} of {} bytes", index < std::size(kNames) ? kNames[index] : "?", bytes);
  }
};

class SocketCommunicator final : public Communicator {
 public:
  SocketCommunicator(int rank, int ranks, std::vector<Connection> links,
                     std::chrono::milliseconds timeout)
      : Communicator(rank, ranks), links_(std::move(links)), timeout_(timeout) {}

  std::string_view name() const override { return "tcp"; }
  void set_timeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }

  void abort(std::string_view reason) override {
    {
      const std::lock_guard lock(mutex_);
      if (failure_) return;
      failure_ = std::string(reason.substr(0, kMaxReason));
    }
    // A call that is sending now ends without the reason.
    const std::unique_lock sending(sending_, std::try_to_lock);
    const Head head{Call::failure, 0, failure_->size()};
    for (const Connection& link : links_) {
      if (!link.is_open()) continue;
      const Deadline now = after(std::chrono::milliseconds(0));
      if (sending.owns_lock() && link.send(&head, sizeof(head), now, true).empty()) {
        (void)link.send(failure_->data(), failure_->size(), now);
      }
      link.end();
    }
  }

  void check() override {
    throw_if_failed();
    for (size_t i = 0; i < links_.size(); ++i) {
      Head head;
      const int64_t got = links_[i].is_open() ? links_[i].peek(&head, sizeof(head)) : 0;
      if (got < 0) fail_all(fmt::format("rank {} has left", rank_of(i)));
      if (got == sizeof(head) && head.call == Call::failure) fail_by(i);
    }
  }

 protected:
  void run_all_reduce(const Reduction& call, Stream) override {
    const size_t bytes = static_cast<size_t>(call.count) * dtype_bytes(call.dtype);
    const Head head{Call::all_reduce,
                    static_cast<uint32_t>(call.dtype) * 2 + (call.op == ReduceOp::max ? 1U : 0U),
                    bytes};
    if (rank() != 0) return exchange(head, call.send, bytes, call.receive, bytes);
    make_room(bytes * links_.size());
    std::vector<const void*> in = {call.send};
    for (size_t other = 1; other < links_.size(); ++other) {
      receive(other, head, part(other, bytes), bytes);
      in.push_back(part(other, bytes));
    }
    reduce_ranks({in, {&call.receive, 1}, call.dtype, call.op}, 0, call.count);
    send_all(head, call.receive, bytes);
  }

  void run_reduce_scatter(const Reduction& call, Stream) override {
    const size_t bytes = static_cast<size_t>(call.count) * dtype_bytes(call.dtype);
    std::vector<char> parts(bytes * static_cast<size_t>(size()));
    run_all_to_all({call.send, parts.data(), bytes}, nullptr);
    std::vector<const void*> in;
    for (int other = 0; other < size(); ++other) {
      in.push_back(parts.data() + static_cast<size_t>(other) * bytes);
    }
    reduce_ranks({in, {&call.receive, 1}, call.dtype, call.op}, 0, call.count);
  }

  void run_all_gather(const Exchange& call, Stream) override {
    const Head head{Call::all_gather, 0, call.bytes};
    const size_t all = call.bytes * static_cast<size_t>(size());
    if (rank() != 0) return exchange(head, call.send, call.bytes, call.receive, all);
    auto* const to = static_cast<char*>(call.receive);
    if (call.bytes > 0 && call.send != to) std::memcpy(to, call.send, call.bytes);
    for (size_t other = 1; other < links_.size(); ++other) {
      receive(other, head, to + other * call.bytes, call.bytes);
    }
    send_all(head, to, all);
  }

  void run_all_to_all(const Exchange& call, Stream) override {
    const Head head{Call::all_to_all, 0, call.bytes};
    const size_t all = call.bytes * static_cast<size_t>(size());
    if (rank() != 0) return exchange(head, call.send, all, call.receive, all);
    make_room(all * links_.size());
    if (all > 0) std::memcpy(part(0, all), call.send, all);
    for (size_t other = 1; other < links_.size(); ++other) {
      receive(other, head, part(other, all), all);
    }
    std::vector<char> parts(all);
    for (size_t other = links_.size(); other-- > 0;) {
      for (size_t from = 0; call.bytes > 0 && from < links_.size(); ++from) {
        std::memcpy(parts.data() + from * call.bytes, part(from, all) + other * call.bytes,
                    call.bytes);
      }
      if (other > 0) send(other, head, parts.data(), all);
    }
    if (all > 0) std::memcpy(call.receive, parts.data(), all);
  }

  // Rank 0 as root waits for nobody.
  void run_broadcast(void* data, size_t bytes, int root, Stream) override {
    const Head head{Call::broadcast, static_cast<uint32_t>(root), bytes};
    throw_if_failed();
    if (rank() != 0) {
      if (rank() == root) return send(0, head, data, bytes);
      return receive(0, head, data, bytes);
    }
    if (root != 0) receive(static_cast<size_t>(root), head, data, bytes);
    for (size_t other = 1; other < links_.size(); ++other) {
      if (other != static_cast<size_t>(root)) send(other, head, data, bytes);
    }
  }

  void run_barrier(Stream) override {
    const Head head{Call::barrier, 0, 0};
    if (rank() != 0) return exchange(head, nullptr, 0, nullptr, 0);
    for (size_t other = 1; other < links_.size(); ++other) receive(other, head, nullptr, 0);
    send_all(head, nullptr, 0);
  }

 private:
  size_t rank_of(size_t link) const { return rank() == 0 ? link : 0; }
  void make_room(size_t bytes) {
    if (received_.size() < bytes) received_.resize(bytes);
  }
  char* part(size_t rank, size_t bytes) { return received_.data() + rank * bytes; }

  void exchange(const Head& head, const void* data, size_t bytes, void* answer, size_t all) {
    send(0, head, data, bytes);
    receive(0, head, answer, all);
  }
  void send_all(const Head& head, const void* data, size_t bytes) {
    for (size_t other = 1; other < links_.size(); ++other) send(other, head, data, bytes);
  }
  void send(size_t link, const Head& head, const void* data, size_t bytes) {
    throw_if_failed();
    std::string problem;
    {
      const std::lock_guard lock(sending_);
      const Deadline end = after(timeout_);
      problem = links_[link].send(&head, sizeof(head), end, bytes > 0);
      if (problem.empty()) problem = links_[link].send(data, bytes, end);
    }
    fail_if(problem, link, head);
  }
  void receive(size_t link, const Head& head, void* data, size_t bytes) {
    throw_if_failed();
    const Deadline end = after(timeout_);
    Head got;
    fail_if(links_[link].receive(&got, sizeof(got), end), link, head);
    if (got.call == Call::failure) fail_with_reason(link, got.bytes);
    if (got != head) {
      fail_all(fmt::format("the ranks disagree: rank {} called {}, rank {} called {}", rank(),
                           head.describe(), rank_of(link), got.describe()));
    }
    fail_if(links_[link].receive(data, bytes, end), link, head);
  }

  void throw_if_failed() {
    const std::lock_guard lock(mutex_);
    if (failure_) fail(ErrorCode::device_failure, "{}", *failure_);
  }
  void fail_all(const std::string& reason) {
    abort(reason);
    throw_if_failed();
  }
  // A link that abort() has ended leads to its reason.
  void fail_if(const std::string& problem, size_t link, const Head& head) {
    if (problem.empty()) return;
    fail_all(fmt::format("tcp: {}: rank {} {} (timeout {} ms)",
                         kNames[static_cast<size_t>(head.call)], rank_of(link), problem,
                         timeout_.load().count()));
  }
  // The next message of the link is a failure.
  void fail_by(size_t link) {
    Head head;
    fail_if(links_[link].receive(&head, sizeof(head), after(timeout_)), link, head);
    fail_with_reason(link, head.bytes);
  }
  void fail_with_reason(size_t link, uint64_t bytes) {
    std::string reason(std::min<uint64_t>(bytes, kMaxReason), '\0');
    const std::string problem = links_[link].receive(reason.data(), reason.size(), after(timeout_));
    fail_all(problem.empty() ? reason : fmt::format("rank {} has failed", rank_of(link)));
  }

  const std::vector<Connection> links_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::vector<char> received_;  // on rank 0: arrays of all ranks
  std::mutex sending_;          // held while the parts of a message are sent
  std::mutex mutex_;
  std::optional<std::string> failure_;
};

}  // namespace

std::unique_ptr<Communicator> make_socket_communicator(int rank, int ranks,
                                                       std::vector<Connection> links,
                                                       std::chrono::milliseconds timeout) {
  return std::make_unique<SocketCommunicator>(rank, ranks, std::move(links), timeout);
}

}  // namespace fovea
