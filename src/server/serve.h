// SPDX-License-Identifier: Apache-2.0
// Serves an engine over HTTP with OpenAI's API.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fovea/engine.h"
#include "server/http_limits.h"

namespace fovea::server {

struct ServeOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 8000;  // 0: a free one
  std::string model;     // the name clients use
  std::vector<std::string> api_keys;
  std::vector<std::string> hosts;  // accepted values of Host besides this machine's
  int32_t max_running = 32;        // EngineOptions::max_requests of the engine
  int32_t max_waiting = 1024;
  HttpLimits http;
  std::chrono::seconds drain_timeout{30};  // for running requests after SIGTERM or SIGINT
};

// Serves until SIGTERM or SIGINT, then answers the requests it has, and returns. Calls `on_ready`
// with the port when clients can connect. Throws Error{invalid_argument} naming an option, and
// Error{io} if the address cannot be used.
void serve(std::unique_ptr<Engine> engine, const ServeOptions& options,
           const std::function<void(uint16_t port)>& on_ready);

}  // namespace fovea::server
