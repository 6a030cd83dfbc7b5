// SPDX-License-Identifier: Apache-2.0
// Rank 0 leads: it tells the others each call that changes an engine, then makes it itself. Between
// the calls only the collectives of the model and the orders go over the communicator.
#include <cstring>
#include <optional>
#include <type_traits>
#include <utility>

#include "core/check.h"
#include "engine/generate.h"
#include "engine/process_rank.h"
#include "engine/rank_engine.h"
#include "engine/rank_messages.h"
#include "engine/rank_orders.h"
#include "fovea/parallel_engine.h"

namespace fovea {
namespace {

// RankMessage::value of `load`.
constexpr uint64_t kContexts = 1, kExperts = 2;

// State of rank 0 besides its engine.
struct Lead {
  explicit Lead(Communicator& ranks) : processes(ranks), heartbeat(ranks) {}

  Communicator& processes;  // used with heartbeat.mutex() held
  bool has_engine = false;
  Heartbeat heartbeat;
};

// The engine that rank 0's caller sees. Made with the mutex held.
class LeadingEngine final : public RankEngine {
 public:
  LeadingEngine(Lead& lead, const EngineOptions& options, RankDivision division)
      : lead_(lead),
        owns_weights_(options.random_weights.has_value() || options.device != "cpu"),
        rank_(load_process_rank(options, lead.processes, division)) {
    lead_.has_engine = true;
  }
  ~LeadingEngine() override {
    const std::lock_guard lock(lead_.heartbeat.mutex());
    lead_.has_engine = false;
    try {
      send_order(lead_.processes, RankOrder::unload, digest_);
    } catch (const Error&) {
      // The other ranks have failed.
    }
    rank_.reset();
  }

  int64_t add(const GenerateRequest& request) override {
    first().check(request);
    MessageWriter message;
    transfer_request(message, request);
    return call("add", RankOrder::add, next_id_, message.bytes(), [&] {
      const int64_t id = first().add(request);
      note_added(id);
      return id;
    });
  }
  // Cancelling throws nothing: after a failure the next step does.
  void cancel(int64_t request) override {
    if (cancel_after_failure(request)) return;
    first().cancel(request);
    tell_others("cancel", RankOrder::cancel, static_cast<uint64_t>(request));
  }
  std::vector<TokenEvent> step() override {
    if (failure_ && !events_.empty()) return take_events();
    return take_events(call("step", RankOrder::step, digest_, {}, [&] {
      std::vector<TokenEvent> events = first().step();
      digest_ = digest_of(events);
      return events;
    }));
  }
  void clear_prefix_cache() override {
    first().clear_prefix_cache();
    tell_others("clear_prefix_cache", RankOrder::clear_prefix_cache, 0);
  }
  std::vector<GenerateResult> generate(std::span<const GenerateRequest> requests,
                                       const std::function<void(const TokenEvent&)>& on_token,
                                       const std::function<bool()>& stop) override {
    return generate_by_steps({*this, next_id_, events_}, requests, on_token, stop);
  }
  std::vector<float> logits(std::span<const int32_t> tokens) override {
    const auto* const bytes = reinterpret_cast<const char*>(tokens.data());
    return call("logits", RankOrder::logits, 0, {bytes, tokens.size_bytes()},
                [&] { return first().logits(tokens); });
  }

  const EngineStats& stats() const override {
    stats_ = first().stats();
    for (size_t rank = 1; rank < rank_->memory.size(); ++rank) {
      add_memory(stats_.memory, rank_->memory[rank], owns_weights_);
    }
    return stats_;
  }
  std::vector<StepRecord> take_step_records() override { return first().take_step_records(); }
  std::string explain() const override {
    return fmt::format("tensor parallelism over {} ranks, processes joined by {}{}; each has:\n{}",
                       lead_.processes.size(), lead_.processes.name(), links(), first().explain());
  }

 protected:
  Engine& first() const override { return *rank_->engine; }

 private:
  std::string links() const {
    if (rank_->nccl == nullptr) return {};
    if (!rank_->why_no_sums.empty()) {
      return fmt::format(", with a GPU each; sums over NCCL ({})", rank_->why_no_sums);
    }
    return ", with a GPU each; sums over NCCL, those of a few rows by writes into peers' memory";
  }

  // Makes the call on all ranks. One that throws ends the engine.
  template <typename Body>
  std::invoke_result_t<Body> call(std::string_view name, RankOrder order, uint64_t value,
                                  std::span<const char> bytes, const Body& body) {
    const std::lock_guard lock(lead_.heartbeat.mutex());
    throw_if_failed();
    try {
      lead_.processes.check();
      send_order(lead_.processes, order, value, bytes);
      return body();
    } catch (const std::exception& error) {
      failure_ = fmt::format("{}: {}", name, error.what());
    }
    lead_.processes.abort(*failure_);
    name_first_failure();
    fail(ErrorCode::device_failure, "{}", *failure_);
  }
  void tell_others(std::string_view name, RankOrder order, uint64_t value) {
    if (failure_) return;
    try {
      call(name, order, value, {}, [] {});
    } catch (const Error&) {
      // failure_ keeps it.
    }
  }
  // The communicator keeps the reason that came first, of whichever rank.
  void name_first_failure() {
    try {
      lead_.processes.check();
    } catch (const Error& error) {
      failure_ = error.what();
    }
  }

  Lead& lead_;
  const bool owns_weights_;
  std::unique_ptr<ProcessRank> rank_;
  uint64_t digest_ = 0;  // digest of the last step's tokens
  mutable EngineStats stats_;
};

// The engine of another rank.
class FollowingEngine {
 public:
  FollowingEngine(Communicator& processes, const RankMessage& message, const std::string& device)
      : processes_(processes) {
    EngineOptions options;
    MessageReader reader(message.bytes);
    transfer_options(reader, options);
    options.device = device;
    options.record_steps = false;
    rank_ = load_process_rank(options, processes,
                              {(message.value & kContexts) != 0, (message.value & kExperts) != 0});
  }

  void obey(const RankMessage& message) {
    switch (message.order) {
      case RankOrder::add:
        return add(message);
      case RankOrder::cancel:
        return engine().cancel(static_cast<int64_t>(message.value));
      case RankOrder::step:
        check_digest(message.value);
        digest_ = digest_of(engine().step());
        return;
      case RankOrder::logits:
        return compute_logits(message.bytes);
      case RankOrder::clear_prefix_cache:
        return engine().clear_prefix_cache();
      case RankOrder::unload:
        return check_digest(message.value);
      default:
        fail(ErrorCode::device_failure, "rank 0 gave the order {} inside an engine",
             static_cast<int>(message.order));
    }
  }

 private:
  Engine& engine() { return *rank_->engine; }
  void add(const RankMessage& message) {
    GenerateRequest request;
    MessageReader reader(message.bytes);
    transfer_request(reader, request);
    const auto id = static_cast<uint64_t>(engine().add(request));
    if (id != message.value) {
      fail(ErrorCode::device_failure, "request {} has id {}", message.value, id);
    }
  }
  void compute_logits(const std::vector<char>& bytes) {
    std::vector<int32_t> tokens(bytes.size() / sizeof(int32_t));
    std::memcpy(tokens.data(), bytes.data(), bytes.size());
    (void)engine().logits(tokens);
  }
  void check_digest(uint64_t digest) const {
    if (digest != digest_) {
      fail(ErrorCode::device_failure, "ranks 0 and {} drew other tokens", processes_.rank());
    }
  }

  Communicator& processes_;
  std::unique_ptr<ProcessRank> rank_;
  uint64_t digest_ = 0;  // digest of the last step's tokens
};

}  // namespace

class RankProcesses::Leader final : public Lead {
 public:
  using Lead::Lead;
};

RankProcesses::RankProcesses(std::unique_ptr<Communicator> processes)
    : processes_(std::move(processes)) {
  check_argument(processes_ != nullptr, "processes is null");
  check_argument(processes_->device() == DeviceKind::cpu,
                 "processes communicate on {}, must on a CPU", processes_->name());
  if (rank() == 0) leader_ = std::make_unique<Leader>(*processes_);
}

RankProcesses::~RankProcesses() {
  if (leader_ == nullptr) return;
  leader_.reset();
  try {
    send_order(*processes_, RankOrder::end);
  } catch (const Error&) {
    // The other ranks have failed.
  }
}

int RankProcesses::rank() const { return processes_->rank(); }
int RankProcesses::size() const { return processes_->size(); }

std::unique_ptr<Engine> RankProcesses::lead(const EngineOptions& options,
                                            const ParallelOptions& parallel) {
  check_argument(leader_ != nullptr, "rank {} loads an engine, only rank 0 may", rank());
  check_argument(options.registry == nullptr,
                 "registry is set, but ranks in other processes have built-in backends only");
  MessageWriter message;
  transfer_options(message, options);
  const std::lock_guard lock(leader_->heartbeat.mutex());
  check_argument(!leader_->has_engine, "the ranks have an engine, they can have one at a time");
  const RankDivision division{parallel.context_parallel > 1, parallel.expert_parallel};
  send_order(*processes_, RankOrder::load,
             (division.contexts ? kContexts : 0) | (division.experts ? kExperts : 0),
             message.bytes());
  return std::make_unique<LeadingEngine>(*leader_, options, division);
}

void RankProcesses::follow(const std::string& device) {
  check_argument(leader_ == nullptr, "rank 0 follows nobody");
  std::unique_ptr<FollowingEngine> engine;
  try {
    while (true) {
      const RankMessage message = receive_order(*processes_);
      if (message.order == RankOrder::end) return;
      if (message.order == RankOrder::wait) continue;
      if (message.order != RankOrder::load) {
        if (engine == nullptr) fail(ErrorCode::device_failure, "rank 0 has loaded no engine");
        engine->obey(message);
        if (message.order == RankOrder::unload) engine.reset();
        continue;
      }
      try {
        engine = std::make_unique<FollowingEngine>(*processes_, message, device);
      } catch (const Error&) {
        processes_->check();  // otherwise rank 0 has got the same error, and may go on
      }
    }
  } catch (const std::exception& error) {
    processes_->abort(fmt::format("rank {} failed: {}", rank(), error.what()));
    throw;
  }
}

}  // namespace fovea
