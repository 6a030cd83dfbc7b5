// SPDX-License-Identifier: Apache-2.0
// Times and numbers that the HTTP server limits, with small limits: slow headers and bodies,
// clients that do not read, idle connections, too many of them.
#include "server/http.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/post.hpp>
#include <chrono>
#include <future>
#include <string>
#include <thread>

namespace fovea::server {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

// A connection to the server.
class Client {
 public:
  explicit Client(uint16_t port, int receive_buffer = 0)
      : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    if (receive_buffer > 0) {
      setsockopt(socket_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof(receive_buffer));
    }
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  }
  ~Client() { close(socket_); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  void send(const std::string& text) const {
    EXPECT_EQ(::send(socket_, text.data(), text.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(text.size()));
  }
  // Returns everything up to the end of the connection, or up to `bytes`.
  std::string receive(size_t bytes = std::string::npos) const {
    std::string all;
    char buffer[4096];
    while (all.size() < bytes) {
      const ssize_t got = recv(socket_, buffer, sizeof(buffer), 0);
      if (got <= 0) break;
      all.append(buffer, static_cast<size_t>(got));
    }
    return all;
  }

 private:
  int socket_;
};

// A server whose handler answers "ok", or a stream without end for /stream.
class HttpLimitsTest : public ::testing::Test {
 protected:
  void start(HttpLimits limits) {
    server_ = std::make_unique<HttpServer>(
        io_, "127.0.0.1", uint16_t{0}, limits,
        HttpHandlers{.request = [this](HttpRequest& request,
                                       HttpClient& client) { return handle(request, client); },
                     .refusal =
                         [](int status, const std::string&) {
                           return HttpAnswer{status, "text/plain", "refused"};
                         }});
    thread_ = std::thread([this] { io_.run(); });
  }
  void TearDown() override {
    asio::post(io_, [this] {
      server_->stop_listening();
      server_->close_all();
    });
    while (connections() > 0) std::this_thread::sleep_for(1ms);
    io_.stop();
    thread_.join();
    server_.reset();
  }
  int64_t connections() {
    std::promise<int64_t> count;
    asio::post(io_, [&] { count.set_value(server_->connections()); });
    return count.get_future().get();
  }

  asio::awaitable<void> handle(HttpRequest& request, HttpClient& client) {
    if (request.path != "/stream") {
      HttpAnswer answer{200, "text/plain", "ok"};
      co_await client.answer(std::move(answer));
      co_return;
    }
    const HttpHeaders headers;
    co_await client.begin_stream("text/plain", headers);
    const std::string text(1 << 16, 'x');
    while (true) co_await client.write(text);  // throws once the client has not read in time
  }

  asio::io_context io_{1};
  asio::executor_work_guard<asio::io_context::executor_type> work_ = asio::make_work_guard(io_);
  std::unique_ptr<HttpServer> server_;
  std::thread thread_;
};

bool has_status(const std::string& answer, const std::string& status) {
  return answer.starts_with("HTTP/1.1 " + status + " ");
}

TEST_F(HttpLimitsTest, SlowHeadersAndBodiesAreAnswered) {
  start({.header_timeout = 1s, .body_timeout = 1s});
  for (const char* beginning : {"G", "GET / HTTP/1.1\r\nHost: a\r\n",
                                "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nabc",
                                "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"}) {
    const Client client(server_->port());
    const auto begin = Clock::now();
    client.send(beginning);
    EXPECT_TRUE(has_status(client.receive(), "408")) << beginning;
    EXPECT_GE(Clock::now() - begin, 900ms);
  }
}

TEST_F(HttpLimitsTest, BytesThatTrickleInDoNotExtendTheTime) {
  start({.header_timeout = 1s});
  const Client client(server_->port());
  const auto begin = Clock::now();
  client.send("GET / HTTP/1.1\r\nX: ");
  for (int i = 0; i < 12; ++i) {
    std::this_thread::sleep_for(60ms);
    client.send("x");
  }
  EXPECT_TRUE(has_status(client.receive(), "408"));
  EXPECT_LT(Clock::now() - begin, 10s);
}

TEST_F(HttpLimitsTest, ClientsThatDoNotReadAreLeft) {
  start({.write_timeout = 1s});
  const Client client(server_->port(), 4096);
  client.send("GET /stream HTTP/1.1\r\nHost: a\r\n\r\n");
  EXPECT_TRUE(has_status(client.receive(20), "200"));
  EXPECT_EQ(connections(), 1);
  const auto begin = Clock::now();
  while (connections() > 0 && Clock::now() - begin < 30s) std::this_thread::sleep_for(5ms);
  EXPECT_EQ(connections(), 0);
}

TEST_F(HttpLimitsTest, IdleConnectionsEnd) {
  start({.idle_timeout = 1s});
  const Client fresh(server_->port()), used(server_->port());
  used.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
  EXPECT_EQ(fresh.receive(), "");
  EXPECT_TRUE(has_status(used.receive(), "200"));
}

TEST_F(HttpLimitsTest, MoreConnectionsAreRefused) {
  start({.connections = 2});
  const Client first(server_->port()), second(server_->port());
  while (connections() < 2) std::this_thread::sleep_for(1ms);
  EXPECT_TRUE(has_status(Client(server_->port()).receive(), "503"));
  first.send("GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
  EXPECT_TRUE(has_status(first.receive(), "200"));
  while (connections() > 1) std::this_thread::sleep_for(1ms);
  const Client next(server_->port());
  next.send("GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
  EXPECT_TRUE(has_status(next.receive(), "200"));
}

}  // namespace
}  // namespace fovea::server
