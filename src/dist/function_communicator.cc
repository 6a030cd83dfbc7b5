// SPDX-License-Identifier: Apache-2.0
// Collectives by a caller's table of functions.
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "core/check.h"
#include "dist/reduce.h"
#include "fovea/communicator.h"

namespace fovea {
namespace {

void check_functions(const CommunicatorFunctions& functions) {
  const bool on_cpu = functions.device == DeviceKind::cpu;
  const std::pair<bool, std::string_view> required[] = {
      {on_cpu || functions.all_reduce != nullptr, "all_reduce"},
      {on_cpu || functions.reduce_scatter != nullptr, "reduce_scatter"},
      {functions.all_gather != nullptr, "all_gather"},
      {functions.all_to_all != nullptr, "all_to_all"},
      {functions.broadcast != nullptr, "broadcast"},
      {functions.barrier != nullptr, "barrier"}};
  for (const auto& [is_there, name] : required) {
    check_argument(is_there, "{} is null, but not optional", name);
  }
  check_argument(functions.device == DeviceKind::cpu || functions.device == DeviceKind::cuda,
                 "device is DeviceKind({}), accepted: cpu, cuda",
                 static_cast<int>(functions.device));
}

class FunctionCommunicator final : public Communicator {
 public:
  explicit FunctionCommunicator(CommunicatorFunctions functions)
      : Communicator(functions.rank, functions.size), functions_(std::move(functions)) {}
  ~FunctionCommunicator() override {
    if (functions_.destroy != nullptr) functions_.destroy(functions_.context);
  }

  std::string_view name() const override { return functions_.name; }
  DeviceKind device() const override { return functions_.device; }
  bool capturable() const override { return functions_.capturable; }
  void abort(std::string_view reason) override {
    {
      const std::lock_guard lock(mutex_);
      if (failure_) return;
      failure_ = reason;
    }
    if (functions_.abort != nullptr) functions_.abort(functions_.context);
  }
  void set_timeout(std::chrono::milliseconds timeout) override {
    if (functions_.set_timeout != nullptr) functions_.set_timeout(functions_.context, timeout);
  }
  void check() override {
    throw_if_failed();
    if (functions_.async_error != nullptr) {
      returned(functions_.async_error(functions_.context), "an enqueued call");
    }
  }

 protected:
  void run_all_reduce(const Reduction& call, Stream stream) override {
    throw_if_failed();
    if (functions_.all_reduce == nullptr) return gather_and_reduce(call);
    returned(functions_.all_reduce(functions_.context, call.send, call.receive, call.count,
                                   call.dtype, call.op, stream),
             "all_reduce");
  }
  void run_reduce_scatter(const Reduction& call, Stream stream) override {
    throw_if_failed();
    if (functions_.reduce_scatter == nullptr) return exchange_and_reduce(call);
    returned(functions_.reduce_scatter(functions_.context, call.send, call.receive, call.count,
                                       call.dtype, call.op, stream),
             "reduce_scatter");
  }
  void run_all_gather(const Exchange& call, Stream stream) override {
    throw_if_failed();
    returned(functions_.all_gather(functions_.context, call.send, call.receive, call.bytes, stream),
             "all_gather");
  }
  void run_all_to_all(const Exchange& call, Stream stream) override {
    throw_if_failed();
    returned(functions_.all_to_all(functions_.context, call.send, call.receive, call.bytes, stream),
             "all_to_all");
  }
  void run_broadcast(void* data, size_t bytes, int root, Stream stream) override {
    throw_if_failed();
    returned(functions_.broadcast(functions_.context, data, bytes, root, stream), "broadcast");
  }
  void run_barrier(Stream stream) override {
    throw_if_failed();
    returned(functions_.barrier(functions_.context, stream), "barrier");
  }

 private:
  // The arrays of all ranks, or each rank's part for this one, and their sum.
  void gather_and_reduce(const Reduction& call) {
    const size_t bytes = make_room(call);
    run_all_gather({call.send, exchanged_.data(), bytes}, nullptr);
    reduce_exchanged(call, bytes);
  }
  void exchange_and_reduce(const Reduction& call) {
    const size_t bytes = make_room(call);
    run_all_to_all({call.send, exchanged_.data(), bytes}, nullptr);
    reduce_exchanged(call, bytes);
  }
  size_t make_room(const Reduction& call) {
    const size_t bytes = static_cast<size_t>(call.count) * dtype_bytes(call.dtype);
    if (exchanged_.size() < bytes * static_cast<size_t>(size())) {
      exchanged_.resize(bytes * static_cast<size_t>(size()));
    }
    return bytes;
  }
  void reduce_exchanged(const Reduction& call, size_t bytes) {
    std::vector<const void*> in;
    for (int rank = 0; rank < size(); ++rank) {
      in.push_back(exchanged_.data() + static_cast<size_t>(rank) * bytes);
    }
    reduce_ranks({in, {&call.receive, 1}, call.dtype, call.op}, 0, call.count);
  }

  void throw_if_failed() {
    const std::lock_guard lock(mutex_);
    if (failure_) fail(ErrorCode::device_failure, "{}", *failure_);
  }
  // Throws if a function returned an error, after telling the other ranks.
  void returned(int error, std::string_view call) {
    if (error == 0) return;
    const char* text =
        functions_.describe != nullptr ? functions_.describe(functions_.context, error) : nullptr;
    abort(fmt::format("{}: {} returned {}{}{} on rank {}", functions_.name, call, error,
                      text != nullptr ? ", " : "", text != nullptr ? text : "", rank()));
    throw_if_failed();
  }

  const CommunicatorFunctions functions_;
  std::vector<char> exchanged_;  // arrays of all ranks
  std::mutex mutex_;
  std::optional<std::string> failure_;
};

}  // namespace

std::unique_ptr<Communicator> make_communicator(CommunicatorFunctions functions) {
  check_functions(functions);
  return std::make_unique<FunctionCommunicator>(std::move(functions));
}

}  // namespace fovea
