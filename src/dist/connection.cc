// SPDX-License-Identifier: Apache-2.0
#include "dist/connection.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "core/check.h"

namespace fovea {
namespace {

constexpr const char* kLate = "did not come in time";
constexpr const char* kLeft = "has left";

std::string text_of(int error) { return std::generic_category().message(error); }

// Waits until the socket can be read or written; returns false at the deadline.
bool wait_for(int socket, short events, Deadline end) {
  while (true) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    if (left.count() <= 0) return false;
    pollfd polled{socket, events, 0};
    constexpr int64_t kMaxWait = 1 << 30;
    const int ready = poll(&polled, 1, static_cast<int>(std::min<int64_t>(left.count(), kMaxWait)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return true;  // the call that follows names the error
  }
}

bool is_gone(int error) { return error == EPIPE || error == ECONNRESET; }

sockaddr_in socket_address(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  return address;
}

}  // namespace

Connection::Connection(int socket) : socket_(socket) {
  if (socket < 0) return;
  fcntl(socket, F_SETFD, FD_CLOEXEC);
  fcntl(socket, F_SETFL, O_NONBLOCK);
  const int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

Connection::~Connection() {
  if (socket_ >= 0) close(socket_);
}

Connection& Connection::operator=(Connection&& other) noexcept {
  std::swap(socket_, other.socket_);
  return *this;
}

std::string Connection::send(const void* data, size_t bytes, Deadline end, bool more) const {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(socket_, from, bytes, MSG_NOSIGNAL | (more ? MSG_MORE : 0));
    if (sent >= 0) {
      from += sent;
      bytes -= static_cast<size_t>(sent);
    } else if (is_gone(errno)) {
      return kLeft;
    } else if (errno == EAGAIN) {
      if (!wait_for(socket_, POLLOUT, end)) return kLate;
    } else if (errno != EINTR) {
      return "cannot be sent to: " + text_of(errno);
    }
  }
  return {};
}

std::string Connection::receive(void* data, size_t bytes, Deadline end) const {
  auto* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = recv(socket_, to, bytes, 0);
    if (got > 0) {
      to += got;
      bytes -= static_cast<size_t>(got);
    } else if (got == 0 || is_gone(errno)) {
      return kLeft;
    } else if (errno == EAGAIN) {
      if (!wait_for(socket_, POLLIN, end)) return kLate;
    } else if (errno != EINTR) {
      return "cannot be received from: " + text_of(errno);
    }
  }
  return {};
}

int64_t Connection::peek(void* data, size_t bytes) const {
  const ssize_t got = recv(socket_, data, bytes, MSG_PEEK | MSG_DONTWAIT);
  if (got > 0) return got;
  return got < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : -1;
}

void Connection::end() const { shutdown(socket_, SHUT_RDWR); }

Listener::Listener() : handle_(socket(AF_INET, SOCK_STREAM, 0)) {
  socket_ = Connection(handle_);
  sockaddr_in address = socket_address(0);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  socklen_t length = sizeof(address);
  if (handle_ < 0 || bind(handle_, any, length) != 0 || listen(handle_, SOMAXCONN) != 0 ||
      getsockname(handle_, any, &length) != 0) {
    fail(ErrorCode::io, "rank 0 cannot listen for the others: {}", text_of(errno));
  }
  port_ = ntohs(address.sin_port);
}

Connection Listener::accept(Deadline end) const {
  while (wait_for(handle_, POLLIN, end)) {
    const int socket = ::accept(handle_, nullptr, nullptr);
    if (socket >= 0) return Connection(socket);
  }
  return {};
}

Connection connect_to(const std::string& address, uint16_t port, Deadline end) {
  sockaddr_in to = socket_address(port);
  if (inet_pton(AF_INET, address.c_str(), &to.sin_addr) != 1) return {};
  const int handle = socket(AF_INET, SOCK_STREAM, 0);
  Connection made(handle);
  if (connect(handle, reinterpret_cast<const sockaddr*>(&to), sizeof(to)) == 0) return made;
  if (errno != EINPROGRESS || !wait_for(handle, POLLOUT, end)) return {};
  int error = 0;
  socklen_t length = sizeof(error);
  getsockopt(handle, SOL_SOCKET, SO_ERROR, &error, &length);
  return error == 0 ? std::move(made) : Connection();
}

std::vector<std::string> own_addresses() {
  std::vector<std::string> addresses;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) all = nullptr;
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != AF_INET) continue;
    if ((one->ifa_flags & IFF_LOOPBACK) != 0 || (one->ifa_flags & IFF_UP) == 0) continue;
    char text[INET_ADDRSTRLEN] = {};
    const auto* const address = reinterpret_cast<const sockaddr_in*>(one->ifa_addr);
    inet_ntop(AF_INET, &address->sin_addr, text, sizeof(text));
    addresses.emplace_back(text);
  }
  freeifaddrs(all);
  addresses.emplace_back("127.0.0.1");
  return addresses;
}

}  // namespace fovea
