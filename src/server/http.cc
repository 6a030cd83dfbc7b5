// SPDX-License-Identifier: Apache-2.0
#include "server/http.h"

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <utility>

#include "core/check.h"
#include "core/quote.h"
#include "server/http_connection.h"

namespace fovea::server {

using asio::ip::tcp;

std::string_view HttpRequest::header(const std::string& name) const {
  const auto found = headers.find(name);
  return found == headers.end() ? std::string_view() : std::string_view(found->second);
}

struct HttpServer::State : std::enable_shared_from_this<State> {
  State(asio::io_context& context, HttpLimits given, HttpHandlers functions)
      : io(context), acceptor(context) {
    shared->limits = given;
    shared->handlers = std::move(functions);
  }

  void listen(const std::string& host, uint16_t port);
  asio::awaitable<void> accept();

  asio::io_context& io;
  tcp::acceptor acceptor;
  std::shared_ptr<ConnectionSharing> shared = std::make_shared<ConnectionSharing>();
};

void HttpServer::State::listen(const std::string& host, uint16_t port) {
  const auto check = [&](const boost::system::error_code& error) {
    if (error) {
      fail(ErrorCode::io, "cannot listen on {} port {}: {}", printable(host), port,
           error.message());
    }
  };
  boost::system::error_code error;
  const auto found =
      tcp::resolver(io).resolve(host, std::to_string(port), tcp::resolver::passive, error);
  check(error);
  const tcp::endpoint endpoint = found.begin()->endpoint();
  acceptor.open(endpoint.protocol(), error);
  check(error);
  acceptor.set_option(tcp::acceptor::reuse_address(true), error);
  check(error);
  acceptor.bind(endpoint, error);
  check(error);
  acceptor.listen(tcp::acceptor::max_listen_connections, error);
  check(error);
}

asio::awaitable<void> HttpServer::State::accept() {
  while (acceptor.is_open()) {
    boost::system::error_code error;
    tcp::socket socket =
        co_await acceptor.async_accept(asio::redirect_error(asio::use_awaitable, error));
    if (error == asio::error::operation_aborted) co_return;
    if (error) {
      // No file descriptor is left, or the client is gone: waits for others to close.
      asio::steady_timer pause(io, std::chrono::milliseconds(50));
      co_await pause.async_wait(asio::redirect_error(asio::use_awaitable, error));
      continue;
    }
    socket.set_option(tcp::no_delay(true), error);
    asio::co_spawn(io, serve_connection(std::move(socket), shared), asio::detached);
  }
}

HttpServer::HttpServer(asio::io_context& io, const std::string& host, uint16_t port,
                       HttpLimits limits, HttpHandlers handlers)
    : state_(std::make_shared<State>(io, limits, std::move(handlers))) {
  state_->listen(host, port);
  asio::co_spawn(
      io, [state = state_] { return state->accept(); }, asio::detached);
}

HttpServer::~HttpServer() { stop_listening(); }

uint16_t HttpServer::port() const { return state_->acceptor.local_endpoint().port(); }

int64_t HttpServer::connections() const {
  return static_cast<int64_t>(state_->shared->connections.size());
}

void HttpServer::stop_listening() {
  boost::system::error_code ignored;
  state_->acceptor.close(ignored);
}

void HttpServer::close_idle() {
  state_->shared->closing = true;
  for (HttpConnection* connection : state_->shared->connections) connection->close_if_idle();
}

void HttpServer::close_all() {
  state_->shared->closing = true;
  for (HttpConnection* connection : state_->shared->connections) connection->close();
}

}  // namespace fovea::server
