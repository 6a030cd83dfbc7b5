// SPDX-License-Identifier: Apache-2.0
// The function that the fuzzer of the server's bodies runs. A refused body throws ApiError 400; any
// other failure aborts. An ordinary test runs it over the committed corpus.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>

#include "fovea/engine.h"
#include "server/api_error.h"
#include "server/completion_request.h"
#include "support/chat_model.h"

namespace fovea::fuzz {

inline Engine& small_engine() {
  static const std::unique_ptr<Engine> engine = [] {
    static const ChatModel model("qwen2_5");
    EngineOptions options;
    options.model_path = model.folder();
    options.kv_memory_bytes = size_t{8} << 20;
    options.max_context = 1024;
    options.threads = 1;
    return Engine::load(options);
  }();
  return *engine;
}

// Returns false if the body is refused. The engine takes everything that the server takes.
inline bool read_request(server::Dialect dialect, std::string_view text) {
  try {
    const auto request = server::read_completion(dialect, text, small_engine());
    for (const ServiceRequest& one : request.requests(1)) {
      const int64_t id = small_engine().add(one.request);
      small_engine().cancel(id);
    }
    (void)small_engine().step();
    if (!small_engine().idle()) std::abort();
    return true;
  } catch (const server::ApiError& error) {
    if (error.status() != 400 || !nlohmann::json::accept(error.body())) std::abort();
    return false;
  }
}

// The first byte chooses the endpoint: 'c' is a chat.
inline void read_request(std::span<const uint8_t> data) {
  const std::string_view bytes(reinterpret_cast<const char*>(data.data()), data.size());
  if (bytes.empty()) return;
  const auto dialect = bytes[0] == 'c' ? server::Dialect::chat : server::Dialect::completions;
  (void)read_request(dialect, bytes.substr(1));
}

}  // namespace fovea::fuzz
