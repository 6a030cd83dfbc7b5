// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <mutex>
#include <optional>

#include "core/check.h"
#include "fovea/communicator.h"

namespace fovea {
namespace {

class SelfCommunicator final : public Communicator {
 public:
  SelfCommunicator() : Communicator(0, 1) {}

  std::string_view name() const override { return "self"; }
  void abort(std::string_view reason) override {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = reason;
  }
  void check() override {
    const std::lock_guard lock(mutex_);
    if (failure_) fail(ErrorCode::device_failure, "{}", *failure_);
  }

 protected:
  void run_all_reduce(const Reduction& call, Stream) override { copy(call); }
  void run_reduce_scatter(const Reduction& call, Stream) override { copy(call); }
  void run_all_gather(const Exchange& call, Stream) override { copy(call); }
  void run_all_to_all(const Exchange& call, Stream) override { copy(call); }
  void run_broadcast(void*, size_t, int, Stream) override { check(); }
  void run_barrier(Stream) override { check(); }

 private:
  void copy(const Reduction& call) {
    copy(Exchange{call.send, call.receive,
                  static_cast<size_t>(call.count) * dtype_bytes(call.dtype)});
  }
  void copy(const Exchange& call) {
    check();
    if (call.bytes > 0 && call.send != call.receive) {
      std::memcpy(call.receive, call.send, call.bytes);
    }
  }

  std::mutex mutex_;
  std::optional<std::string> failure_;
};

}  // namespace

std::unique_ptr<Communicator> make_self_communicator() {
  return std::make_unique<SelfCommunicator>();
}

}  // namespace fovea
