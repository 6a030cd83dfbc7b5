// SPDX-License-Identifier: Apache-2.0
#include "fovea/engine_service.h"

#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "core/check.h"

namespace fovea {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int32_t kMaxPriority = 3600;

void check_request(const Engine& engine, const ServiceRequest& request, size_t index,
                   size_t count) {
  try {
    check_argument(request.priority >= -kMaxPriority && request.priority <= kMaxPriority,
                   "priority is {}, must be in [{}, {}]", request.priority, -kMaxPriority,
                   kMaxPriority);
    engine.check(request.request);
  } catch (const Error& error) {
    if (count == 1) throw;
    throw Error(error.code(), fmt::format("request {} of {}: {}", index + 1, count, error.what()));
  }
}

class ServiceLoop {
 public:
  ServiceLoop(std::unique_ptr<Engine> engine, ServiceOptions options)
      : engine_(std::move(engine)), options_(std::move(options)) {
    shared_.stats.engine = engine_->stats();
    thread_ = std::thread([this] { run(); });
  }

  ~ServiceLoop() {
    {
      const std::lock_guard lock(mutex_);
      shared_.draining = shared_.stopping = true;
    }
    work_.notify_one();
    thread_.join();
  }

  std::vector<int64_t> add(std::vector<ServiceRequest> requests);
  void cancel(std::span<const int64_t> requests);
  void clear_prefix_cache();
  void drain();
  bool draining() const;
  bool wait_idle(std::chrono::milliseconds timeout) const;
  ServiceStats stats() const;
  int32_t max_waiting() const { return options_.max_waiting; }
  const Engine& engine() const { return *engine_; }

 private:
  // The time at which a request of priority 0 would have had to arrive, then the request's id.
  using Rank = std::pair<Clock::time_point, int64_t>;

  struct Running {
    ServiceRequest request;
    std::string failure;  // why its pass failed
  };

  // Everything that other threads reach.
  struct Shared {
    std::map<Rank, ServiceRequest> waiting;
    std::unordered_map<int64_t, Rank> ranks;  // ranks of waiting requests
    std::vector<int64_t> cancelled;
    bool clears_prefix_cache = false;
    bool draining = false, stopping = false;
    int64_t next_id = 1;
    ServiceStats stats;  // `waiting` is counted when asked
  };

  // Commands for the next pass.
  struct Commands {
    std::vector<std::pair<int64_t, ServiceRequest>> admitted, dropped;
    std::vector<int64_t> cancelled;  // inside the engine
    bool clears_prefix_cache = false;
    bool stopping = false;
  };

  void run();
  Commands next_commands();
  void obey(Commands& commands);
  void admit(int64_t id, ServiceRequest request);
  void cancel_running(int64_t id, const std::string& failure);
  void step();
  void fail_pass(const std::string& why);
  void deliver(TokenEvent event);
  void publish();
  static void end(const ServiceRequest& request, int64_t id, FinishReason finish,
                  std::string error);

  const std::unique_ptr<Engine> engine_;
  const ServiceOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable work_;
  mutable std::condition_variable idle_;
  Shared shared_;  // guarded by mutex_

  // Used by thread_ alone.
  std::unordered_map<int64_t, Running> running_;     // by id
  std::unordered_map<int64_t, int64_t> ids_;         // by the engine's id
  std::unordered_map<int64_t, int64_t> engine_ids_;  // by id
  int failures_ = 0;                                 // failed passes since the last good one
  int64_t failed_passes_ = 0;
  bool healthy_ = true;
  std::thread thread_;
};

std::vector<int64_t> ServiceLoop::add(std::vector<ServiceRequest> requests) {
  for (size_t i = 0; i < requests.size(); ++i)
    check_request(*engine_, requests[i], i, requests.size());
  const Clock::time_point now = Clock::now();
  std::vector<int64_t> ids;
  {
    const std::lock_guard lock(mutex_);
    if (shared_.draining) return {};
    const auto limit = static_cast<size_t>(options_.max_waiting);
    if (shared_.waiting.size() + requests.size() > limit) return {};
    for (ServiceRequest& request : requests) {
      const int64_t id = shared_.next_id++;
      const Rank rank{now + std::chrono::seconds(request.priority), id};
      shared_.waiting.emplace(rank, std::move(request));
      shared_.ranks.emplace(id, rank);
      ids.push_back(id);
    }
  }
  work_.notify_one();
  return ids;
}

void ServiceLoop::cancel(std::span<const int64_t> requests) {
  {
    const std::lock_guard lock(mutex_);
    shared_.cancelled.insert(shared_.cancelled.end(), requests.begin(), requests.end());
  }
  work_.notify_one();
}

void ServiceLoop::clear_prefix_cache() {
  {
    const std::lock_guard lock(mutex_);
    shared_.clears_prefix_cache = true;
  }
  work_.notify_one();
}

void ServiceLoop::drain() {
  const std::lock_guard lock(mutex_);
  shared_.draining = true;
}

bool ServiceLoop::draining() const {
  const std::lock_guard lock(mutex_);
  return shared_.draining;
}

bool ServiceLoop::wait_idle(std::chrono::milliseconds timeout) const {
  std::unique_lock lock(mutex_);
  return idle_.wait_for(lock, timeout,
                        [&] { return shared_.waiting.empty() && shared_.stats.running == 0; });
}

ServiceStats ServiceLoop::stats() const {
  const std::lock_guard lock(mutex_);
  ServiceStats stats = shared_.stats;
  stats.waiting = static_cast<int64_t>(shared_.waiting.size());
  return stats;
}

void ServiceLoop::run() {
  while (true) {
    Commands commands = next_commands();
    obey(commands);
    step();
    publish();
    if (options_.after_step) options_.after_step();
    if (commands.stopping && running_.empty()) return;
  }
}

// Waits until there is something to do.
ServiceLoop::Commands ServiceLoop::next_commands() {
  std::unique_lock lock(mutex_);
  work_.wait(lock, [&] {
    return shared_.stopping || !engine_->idle() || !shared_.waiting.empty() ||
           !shared_.cancelled.empty() || shared_.clears_prefix_cache;
  });
  Commands commands;
  commands.stopping = shared_.stopping;
  commands.clears_prefix_cache = std::exchange(shared_.clears_prefix_cache, false);
  const auto take = [&](std::map<Rank, ServiceRequest>::iterator found, auto& into) {
    into.emplace_back(found->first.second, std::move(found->second));
    shared_.ranks.erase(found->first.second);
    shared_.waiting.erase(found);
  };
  for (const int64_t id : std::exchange(shared_.cancelled, {})) {
    if (const auto rank = shared_.ranks.find(id); rank != shared_.ranks.end()) {
      take(shared_.waiting.find(rank->second), commands.dropped);
    } else {
      commands.cancelled.push_back(id);
    }
  }
  while (shared_.stopping && !shared_.waiting.empty())
    take(shared_.waiting.begin(), commands.dropped);
  const auto places = static_cast<size_t>(options_.max_running);
  while (!shared_.waiting.empty() && running_.size() + commands.admitted.size() < places)
    take(shared_.waiting.begin(), commands.admitted);
  // So that wait_idle() misses no request between the queue and the engine.
  shared_.stats.running = static_cast<int64_t>(running_.size() + commands.admitted.size());
  return commands;
}

void ServiceLoop::obey(Commands& commands) {
  for (const auto& [id, request] : commands.dropped) end(request, id, FinishReason::cancelled, {});
  for (const int64_t id : commands.cancelled) cancel_running(id, {});
  if (commands.stopping) {
    for (const auto& [id, request] : running_) cancel_running(id, {});
  }
  if (commands.clears_prefix_cache) engine_->clear_prefix_cache();
  for (auto& [id, request] : commands.admitted) admit(id, std::move(request));
}

void ServiceLoop::admit(int64_t id, ServiceRequest request) {
  try {
    const int64_t engine_id = engine_->add(request.request);
    ids_[engine_id] = id;
    engine_ids_[id] = engine_id;
    request.request = {};  // the engine has its copy
    running_[id] = {std::move(request), {}};
  } catch (const std::exception& error) {
    end(request, id, FinishReason::failed, error.what());
  }
}

void ServiceLoop::cancel_running(int64_t id, const std::string& failure) {
  const auto found = engine_ids_.find(id);
  if (found == engine_ids_.end()) return;
  running_.at(id).failure = failure;
  engine_->cancel(found->second);
}

void ServiceLoop::step() {
  if (engine_->idle()) return;
  std::vector<TokenEvent> events;
  try {
    events = engine_->step();
    failures_ = 0;
  } catch (const std::exception& error) {
    fail_pass(error.what());
  }
  for (TokenEvent& event : events) deliver(std::move(event));
}

void ServiceLoop::fail_pass(const std::string& why) {
  ++failed_passes_;
  if (options_.on_failure) options_.on_failure(why);
  if (++failures_ < 2) return;  // the next step computes the pass again
  failures_ = 0;
  healthy_ = false;
  for (const auto& [engine_id, id] : ids_)
    cancel_running(id, "the pass that computed this request failed");
}

void ServiceLoop::deliver(TokenEvent event) {
  const auto found = ids_.find(event.request);
  if (found == ids_.end()) return;
  const int64_t id = found->second;
  Running& running = running_.at(id);
  event.request = id;
  const bool last = event.finish != FinishReason::none;
  if (event.token >= 0) healthy_ = true;
  if (event.finish == FinishReason::cancelled && !running.failure.empty()) {
    event.finish = FinishReason::failed;
    event.error = running.failure;
  }
  running.request.on_event(std::move(event));
  if (!last) return;
  ids_.erase(found);
  engine_ids_.erase(id);
  running_.erase(id);
}

void ServiceLoop::publish() {
  {
    const std::lock_guard lock(mutex_);
    shared_.stats.engine = engine_->stats();
    shared_.stats.running = static_cast<int64_t>(running_.size());
    shared_.stats.failed_passes = failed_passes_;
    shared_.stats.healthy = healthy_;
    if (!running_.empty() || !shared_.waiting.empty()) return;
  }
  idle_.notify_all();
}

void ServiceLoop::end(const ServiceRequest& request, int64_t id, FinishReason finish,
                      std::string error) {
  TokenEvent event;
  event.request = id;
  event.finish = finish;
  event.error = std::move(error);
  request.on_event(std::move(event));
}

}  // namespace

class EngineService::Worker final : public ServiceLoop {
 public:
  using ServiceLoop::ServiceLoop;
};

EngineService::EngineService(std::unique_ptr<Engine> engine, ServiceOptions options)
    : worker_(std::make_unique<Worker>(std::move(engine), std::move(options))) {}
EngineService::~EngineService() = default;

std::vector<int64_t> EngineService::add(std::vector<ServiceRequest> requests) {
  return worker_->add(std::move(requests));
}
void EngineService::cancel(std::span<const int64_t> requests) { worker_->cancel(requests); }
void EngineService::clear_prefix_cache() { worker_->clear_prefix_cache(); }
void EngineService::drain() { worker_->drain(); }
bool EngineService::draining() const { return worker_->draining(); }
bool EngineService::wait_idle(std::chrono::milliseconds timeout) const {
  return worker_->wait_idle(timeout);
}
ServiceStats EngineService::stats() const { return worker_->stats(); }
int32_t EngineService::max_waiting() const { return worker_->max_waiting(); }
const Engine& EngineService::engine() const { return worker_->engine(); }

}  // namespace fovea
