// SPDX-License-Identifier: Apache-2.0
// HTTP/1.1 under limits: connections, requests and answers. Knows nothing of models. Everything
// runs on the one thread of an io_context.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/io_context.hpp>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/http_limits.h"

namespace fovea::server {

namespace asio = boost::asio;

struct HttpRequest {
  std::string method, path;                    // without the query
  std::map<std::string, std::string> headers;  // the ones that the server reads, by lower-case name
  std::string body;

  // Returns an empty text for a header that the request does not have.
  std::string_view header(const std::string& name) const;
};

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

struct HttpAnswer {
  int status = 200;
  std::string type = "application/json";
  std::string body;
  HttpHeaders headers = {};
};

// The client that waits for an answer. A handler answers once: by answer(), or by begin_stream(),
// any number of write() and end_stream(). Calls throw boost::system::system_error if the client is
// gone or does not read. References must live until a call is complete.
class HttpClient {
 public:
  virtual ~HttpClient() = default;
  virtual asio::awaitable<void> answer(HttpAnswer answer) = 0;
  virtual asio::awaitable<void> begin_stream(std::string_view type, const HttpHeaders& headers) = 0;
  virtual asio::awaitable<void> write(std::string_view text) = 0;
  virtual asio::awaitable<void> end_stream() = 0;
  // Calls back once if the client closes its connection before the answer is complete, at once if
  // it has done so.
  virtual void on_close(std::function<void()> callback) = 0;
  // Returns true if the client has received a part of the answer.
  virtual bool started() const = 0;
};

struct HttpHandlers {
  // Answers a request, which it may take apart. Exceptions close the connection.
  std::function<asio::awaitable<void>(HttpRequest&, HttpClient&)> request;
  // Returns the answer to something that is no request: status 400, 408, 413, 431 or 503.
  std::function<HttpAnswer(int status, const std::string& what)> refusal;
};

class HttpServer {
 public:
  // Binds and listens. Throws Error{io} naming the address. Port 0 takes a free one.
  HttpServer(asio::io_context& io, const std::string& host, uint16_t port, HttpLimits limits,
             HttpHandlers handlers);
  ~HttpServer();

  uint16_t port() const;
  int64_t connections() const;
  void stop_listening();
  // Closes each connection as soon as it has no request.
  void close_idle();
  // Closes every connection.
  void close_all();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace fovea::server
