// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/array.h"
#include "python/bindings/engines.h"
#include "python/bindings/values.h"

namespace fovea::python {

std::vector<TokenEvent> SharedEngine::distribute(std::vector<TokenEvent> events) {
  std::vector<TokenEvent> others;
  for (TokenEvent& event : events) {
    const auto found = streams_.find(event.request);
    if (found == streams_.end()) {
      others.push_back(std::move(event));
      continue;
    }
    const std::shared_ptr<StreamEvents> stream = found->second;
    if (event.finish != FinishReason::none) {
      stream->ended = true;
      streams_.erase(found);
    }
    if (!stream->closed) stream->events.push_back(std::move(event));
  }
  return others;
}

std::vector<TokenEvent> SharedEngine::step() {
  const nb::gil_scoped_release release;
  const std::lock_guard lock(mutex_);
  std::vector<TokenEvent> events = std::move(waiting_);
  waiting_.clear();
  for (TokenEvent& event : distribute(engine_->step())) events.push_back(std::move(event));
  return events;
}

std::pair<int64_t, std::shared_ptr<StreamEvents>> SharedEngine::open_stream(
    const GenerateRequest& request) {
  return locked([&](Engine& engine) {
    const auto stream = std::make_shared<StreamEvents>();
    const int64_t id = engine.add(request);
    streams_.emplace(id, stream);
    return std::pair(id, stream);
  });
}

std::optional<TokenEvent> SharedEngine::next(StreamEvents& stream) {
  for (;;) {
    {
      const nb::gil_scoped_release release;
      const std::lock_guard lock(mutex_);
      if (!stream.events.empty()) {
        TokenEvent event = std::move(stream.events.front());
        stream.events.pop_front();
        return event;
      }
      if (stream.ended || stream.closed || engine_->idle()) return {};
      for (TokenEvent& event : distribute(engine_->step())) waiting_.push_back(std::move(event));
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

void SharedEngine::close(int64_t request, StreamEvents& stream) {
  const nb::gil_scoped_release release;
  const std::lock_guard lock(mutex_);
  if (stream.closed) return;
  stream.closed = true;
  stream.events.clear();
  if (!stream.ended) engine_->cancel(request);
}

GenerateRequest request_from(nb::handle prompt, const char* name) {
  GenerateRequest request;
  if (PyUnicode_Check(prompt.ptr())) {
    request.prompt = string_from(prompt, name);
  } else {
    request.tokens = integers_of<int32_t>(prompt, name);
    check_argument(!request.tokens.empty(), "{} is empty, must have a token", name);
  }
  return request;
}

}  // namespace fovea::python
