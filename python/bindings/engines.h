// SPDX-License-Identifier: Apache-2.0
// The engine as a Python object.
#pragma once

#include <nanobind/nanobind.h>

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "fovea/engine.h"

namespace fovea::python {

namespace nb = nanobind;

// Events of one request that its stream has not returned yet.
struct StreamEvents {
  std::deque<TokenEvent> events;
  bool ended = false;   // the last event arrived
  bool closed = false;  // nobody reads further events
};

// An engine whose calls wait for each other, whatever thread they come from. Functions that lock do
// so without the GIL, so that a callback of generate() can run meanwhile.
class SharedEngine {
 public:
  explicit SharedEngine(std::unique_ptr<Engine> engine) : engine_(std::move(engine)) {}

  template <typename Function>
  auto locked(const Function& function) {
    const nb::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    return function(*engine_);
  }

  // Runs a pass and returns the events of requests that have no stream.
  std::vector<TokenEvent> step();
  // Queues a request whose events go to its stream.
  std::pair<int64_t, std::shared_ptr<StreamEvents>> open_stream(const GenerateRequest& request);
  // Returns the next event of a stream, running passes until there is one; none: it has ended.
  std::optional<TokenEvent> next(StreamEvents& stream);
  void close(int64_t request, StreamEvents& stream);

 private:
  // Gives events to the streams, and returns the others.
  std::vector<TokenEvent> distribute(std::vector<TokenEvent> events);

  std::recursive_mutex mutex_;  // a callback of generate() may call add() and cancel()
  std::unordered_map<int64_t, std::shared_ptr<StreamEvents>> streams_;
  std::vector<TokenEvent> waiting_;  // events for step() that next() received
  std::unique_ptr<Engine> engine_;
};

// Reads a prompt: text or token ids.
GenerateRequest request_from(nb::handle prompt, const char* name);

void bind_engine_types(nb::module_& module);
// Adds load() to the class and explain() to the module.
void bind_loading(nb::module_& module, nb::class_<SharedEngine>& engine);

}  // namespace fovea::python
