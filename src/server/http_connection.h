// SPDX-License-Identifier: Apache-2.0
// One connection of a client: reads its requests one after another.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <memory>
#include <optional>
#include <set>

#include "server/http.h"

namespace fovea::server {

class HttpConnection;

// State that the connections of a server share.
struct ConnectionSharing {
  HttpLimits limits;
  HttpHandlers handlers;
  std::set<HttpConnection*> connections;
  bool closing = false;  // connections end after their current request
};

class HttpConnection final : public HttpClient {
 public:
  HttpConnection(asio::ip::tcp::socket socket, std::shared_ptr<ConnectionSharing> shared);
  ~HttpConnection() override;
  HttpConnection(const HttpConnection&) = delete;
  HttpConnection& operator=(const HttpConnection&) = delete;

  asio::awaitable<void> run();
  void close_if_idle();
  void close();  // as if the client had closed it

  asio::awaitable<void> answer(HttpAnswer answer) override;
  asio::awaitable<void> begin_stream(std::string_view type, const HttpHeaders& headers) override;
  asio::awaitable<void> write(std::string_view text) override;
  asio::awaitable<void> end_stream() override;
  void on_close(std::function<void()> callback) override;
  bool started() const override { return started_; }

 private:
  // Outlives the connection as long as a wait for the end of the input is pending.
  struct Watch {
    HttpConnection* connection = nullptr;  // null once the request is answered
  };

  asio::awaitable<bool> wait_for_request();
  asio::awaitable<std::optional<HttpRequest>> read();
  asio::awaitable<void> refuse(int status, std::string_view what);
  asio::awaitable<void> discard_input();
  void watch_for_close();
  void tell_closed();
  void stop_watching();

  boost::beast::tcp_stream stream_;
  std::shared_ptr<ConnectionSharing> shared_;
  boost::beast::flat_buffer buffer_;
  std::shared_ptr<Watch> watch_;
  std::function<void()> on_close_;
  unsigned version_ = 11;
  bool keep_alive_ = true;
  bool idle_ = true;  // no request is being read or answered
  bool started_ = false, answered_ = false;
  bool closed_ = false;  // the client closed while its request was answered
};

// Serves a connection to its end.
asio::awaitable<void> serve_connection(asio::ip::tcp::socket socket,
                                       std::shared_ptr<ConnectionSharing> shared);

}  // namespace fovea::server
