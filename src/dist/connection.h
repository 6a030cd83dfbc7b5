// SPDX-License-Identifier: Apache-2.0
// TCP connections whose calls have deadlines.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fovea {

using Deadline = std::chrono::steady_clock::time_point;
inline Deadline after(std::chrono::milliseconds time) {
  return std::chrono::steady_clock::now() + time;
}

// Owns a socket. send() and receive() return the problem in words, or an empty string.
class Connection {
 public:
  Connection() = default;
  explicit Connection(int socket);  // makes it non-blocking
  ~Connection();
  Connection(Connection&& other) noexcept : socket_(other.socket_) { other.socket_ = -1; }
  Connection& operator=(Connection&& other) noexcept;

  bool is_open() const { return socket_ >= 0; }
  // With `more`, the bytes may wait for those of the next call.
  std::string send(const void* data, size_t bytes, Deadline end, bool more = false) const;
  std::string receive(void* data, size_t bytes, Deadline end) const;
  // Copies bytes that have arrived, up to `bytes`, without taking them. Returns their number, or -1
  // if the other side has left.
  int64_t peek(void* data, size_t bytes) const;
  // Ends calls of all threads; the other side sees the end after all bytes that were sent.
  void end() const;

 private:
  int socket_ = -1;
};

// Accepts connections to a free port of all of this machine's addresses; without IPv6, or if the
// machine has none, of those of IPv4.
class Listener {
 public:
  explicit Listener(bool ipv6 = true);  // throws Error{io}
  // Returns a connection, or a closed one at the deadline.
  Connection accept(Deadline end) const;
  uint16_t port() const { return port_; }

 private:
  Connection socket_;
  int handle_ = -1;
  uint16_t port_ = 0;
};

// Returns a connection to a numeric address of either family, or a closed one if nobody answers
// until the deadline.
Connection connect_to(const std::string& address, uint16_t port, Deadline end);

// Returns the addresses of this machine that others may reach: those of IPv4, those of IPv6, and
// last those that only this machine reaches, 127.0.0.1 and, if it is there, ::1.
std::vector<std::string> own_addresses();

}  // namespace fovea
