// SPDX-License-Identifier: Apache-2.0
// Limits of the HTTP server.
#pragma once

#include <chrono>
#include <cstdint>

namespace fovea::server {

struct HttpLimits {
  uint32_t header_bytes = 16 << 10;
  uint64_t body_bytes = 8 << 20;
  int32_t connections = 16384;
  std::chrono::seconds idle_timeout{75};    // between the requests of a connection
  std::chrono::seconds header_timeout{10};  // from a header's first byte to its last
  std::chrono::seconds body_timeout{60};
  std::chrono::seconds write_timeout{30};  // one write to a client that does not read
};

}  // namespace fovea::server
