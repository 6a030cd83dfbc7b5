// SPDX-License-Identifier: Apache-2.0
// An engine that many threads use at once: requests from any thread, events by callback.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fovea/api.h"
#include "fovea/engine.h"

namespace FOVEA_API fovea {

struct ServiceOptions {
  int32_t max_running = 32;    // requests inside the engine: EngineOptions::max_requests
  int32_t max_waiting = 1024;  // requests that wait for one of these places
  // Called on the service's thread after the events of a step, so that a caller can hand them on
  // together.
  std::function<void()> after_step = {};
  // Called on the service's thread with the message of a pass that failed.
  std::function<void(const std::string&)> on_failure = {};
};

struct ServiceRequest {
  GenerateRequest request;
  // In [-3600, 3600]: smaller numbers are served first. One unit is worth one second of waiting, so
  // no request waits forever.
  int32_t priority = 0;
  // Receives the events of this request on the service's thread, in order. Must not throw, block or
  // call the service, except for cancel().
  std::function<void(TokenEvent)> on_event;
};

struct ServiceStats {
  EngineStats engine;
  int64_t running = 0, waiting = 0;
  int64_t failed_passes = 0;
  bool healthy = true;  // false from a request that failed with its pass to the next good pass
};

// Owns an engine and the thread that runs it. All members are thread-safe. The thread sleeps while
// there is no request. Waiting requests enter the engine in the order of their arrival and
// priority. If a pass fails, the engine computes it once more; if it fails again, all requests
// inside the engine end with FinishReason::failed, and the service continues.
class EngineService {
 public:
  EngineService(std::unique_ptr<Engine> engine, ServiceOptions options);
  // Cancels all requests and delivers their last events.
  ~EngineService();
  EngineService(const EngineService&) = delete;
  EngineService& operator=(const EngineService&) = delete;

  // Adds all requests and returns their ids, or adds none and returns nothing if the queue is too
  // full or the service drains. Ids count up from 1; they are the TokenEvent::request of events,
  // which may arrive before add() returns. Throws as Engine::add() does, naming the request's index
  // if there are several.
  std::vector<int64_t> add(std::vector<ServiceRequest> requests);
  // Ends requests before the next pass; each receives its last event. Unknown ids are ignored.
  void cancel(std::span<const int64_t> requests);
  void clear_prefix_cache();  // before the next pass
  // Refuses requests from now on.
  void drain();
  bool draining() const;
  // Returns true once no request is left, or false after the timeout.
  bool wait_idle(std::chrono::milliseconds timeout) const;
  ServiceStats stats() const;
  int32_t max_waiting() const;
  // Returns the engine for its thread-safe members alone.
  const Engine& engine() const;

 private:
  class Worker;
  std::unique_ptr<Worker> worker_;
};

}  // namespace fovea
