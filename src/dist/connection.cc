// SPDX-License-Identifier: Apache-2.0
#include "dist/connection.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>
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

// An address of either family, by getaddrinfo().
using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// Returns the numeric address, or all of this machine's in a family if it is null; null: there is
// none.
Addresses find_address(const char* address, uint16_t port, int family) {
  addrinfo wanted{};
  wanted.ai_family = family;
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | AI_PASSIVE;
  addrinfo* found = nullptr;
  const std::string service = std::to_string(port);
  if (getaddrinfo(address, service.c_str(), &wanted, &found) != 0) found = nullptr;
  return {found, &freeaddrinfo};
}

// Returns a socket that listens at a free port of all addresses, or -1 and errno. One of IPv6
// takes connections to addresses of IPv4, too.
int listen_to(int family) {
  const Addresses any = find_address(nullptr, 0, family);
  if (any == nullptr) {
    errno = EAFNOSUPPORT;
    return -1;
  }
  const int handle = socket(family, SOCK_STREAM, 0);
  if (handle < 0) return -1;
  const int off = 0;
  if (family == AF_INET6) setsockopt(handle, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  if (bind(handle, any->ai_addr, any->ai_addrlen) == 0 && listen(handle, SOMAXCONN) == 0) {
    return handle;
  }
  const int error = errno;
  close(handle);
  errno = error;
  return -1;
}

// Both families have the port at the same place.
uint16_t port_of(int socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

std::string text_of(const sockaddr& address, socklen_t length) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  getnameinfo(&address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  return text.data();
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

Listener::Listener(bool ipv6) : handle_(ipv6 ? listen_to(AF_INET6) : -1) {
  if (handle_ < 0) handle_ = listen_to(AF_INET);  // machines may have no IPv6
  if (handle_ < 0) fail(ErrorCode::io, "rank 0 cannot listen for the others: {}", text_of(errno));
  socket_ = Connection(handle_);
  port_ = port_of(handle_);
}

Connection Listener::accept(Deadline end) const {
  while (wait_for(handle_, POLLIN, end)) {
    const int socket = ::accept(handle_, nullptr, nullptr);
    if (socket >= 0) return Connection(socket);
  }
  return {};
}

Connection connect_to(const std::string& address, uint16_t port, Deadline end) {
  const Addresses to = find_address(address.c_str(), port, AF_UNSPEC);
  if (to == nullptr) return {};
  const int handle = socket(to->ai_family, SOCK_STREAM, 0);
  Connection made(handle);
  if (connect(handle, to->ai_addr, to->ai_addrlen) == 0) return made;
  if (errno != EINPROGRESS || !wait_for(handle, POLLOUT, end)) return {};
  int error = 0;
  socklen_t length = sizeof(error);
  getsockopt(handle, SOL_SOCKET, SO_ERROR, &error, &length);
  return error == 0 ? std::move(made) : Connection();
}

std::vector<std::string> own_addresses() {
  std::vector<std::string> ipv4, ipv6, own = {"127.0.0.1"};
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) all = nullptr;
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0) continue;
    const bool is_own = (one->ifa_flags & IFF_LOOPBACK) != 0;
    if (one->ifa_addr->sa_family == AF_INET && !is_own) {
      ipv4.push_back(text_of(*one->ifa_addr, sizeof(sockaddr_in)));
    }
    if (one->ifa_addr->sa_family != AF_INET6) continue;
    const in6_addr& address = reinterpret_cast<const sockaddr_in6*>(one->ifa_addr)->sin6_addr;
    // Others would need the name that their own interface has.
    if (IN6_IS_ADDR_LINKLOCAL(&address)) continue;
    (is_own ? own : ipv6).push_back(text_of(*one->ifa_addr, sizeof(sockaddr_in6)));
  }
  freeifaddrs(all);
  ipv4.insert(ipv4.end(), ipv6.begin(), ipv6.end());
  ipv4.insert(ipv4.end(), own.begin(), own.end());
  return ipv4;
}

}  // namespace fovea
