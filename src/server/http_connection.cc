// SPDX-License-Identifier: Apache-2.0
#include "server/http_connection.h"

#include <fmt/format.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/buffers_suffix.hpp>
#include <boost/beast/http.hpp>
#include <cctype>
#include <cerrno>
#include <exception>

#include "fovea/version.h"

namespace fovea::server {
namespace {

namespace beast = boost::beast;
namespace http = beast::http;
using asio::use_awaitable;
using boost::system::error_code;

using Parser = http::request_parser<http::string_body>;

constexpr std::array<const char*, 6> kReadHeaders = {"authorization", "host",        "origin",
                                                     "x-request-id",  "traceparent", "expect"};

// How much of a refused request is read, so that the client sees the answer before the end of the
// connection.
constexpr size_t kMaxDiscarded = 16 << 20;
constexpr std::chrono::seconds kDiscardTimeout{2};

// Ends the operation of a stream that takes too long. The timeout of tcp_stream itself closes the
// socket, so that nobody could answer.
class Deadline {
 public:
  Deadline(beast::tcp_stream& stream, std::chrono::seconds time) : timer_(stream.get_executor()) {
    stream.expires_never();
    timer_.expires_after(time);
    timer_.async_wait([state = state_, &stream](const error_code& error) {
      if (error || state->over) return;
      state->expired = true;
      stream.cancel();
    });
  }
  ~Deadline() { state_->over = true; }
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;
  bool expired() const { return state_->expired; }

 private:
  struct State {
    bool over = false, expired = false;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
  asio::steady_timer timer_;
};

auto with_error(error_code& error) { return asio::redirect_error(use_awaitable, error); }

HttpRequest take_request(Parser& parser) {
  http::request<http::string_body> message = parser.release();
  HttpRequest request;
  request.method = std::string(message.method_string());
  const std::string_view target(message.target().data(), message.target().size());
  request.path = std::string(target.substr(0, target.find('?')));
  for (const char* name : kReadHeaders) {
    if (const auto found = message.find(name); found != message.end())
      request.headers.emplace(name, std::string(found->value()));
  }
  request.body = std::move(message.body());
  return request;
}

// Returns the status that answers an error of reading, or 0 if nobody is left to answer.
int status_of(const error_code& error) {
  if (error == beast::error::timeout) return 408;
  if (error == http::error::header_limit) return 431;
  if (error == http::error::body_limit) return 413;
  if (error == http::error::end_of_stream || error == http::error::partial_message) return 0;
  return error.category() == http::make_error_code(http::error::bad_line_ending).category() ? 400
                                                                                            : 0;
}

// Sends as much as the client has room for, and returns the rest. A client that reads costs no
// timer and no wait.
template <typename Buffers>
beast::buffers_suffix<Buffers> send_now(beast::tcp_stream& stream, const Buffers& buffers) {
  beast::buffers_suffix<Buffers> rest(buffers);
  error_code error;
  rest.consume(stream.socket().write_some(buffers, error));
  if (error && error != asio::error::would_block) throw boost::system::system_error(error);
  return rest;
}

template <typename Body>
void add_headers(http::response<Body>& response, std::string_view type,
                 const HttpHeaders& headers) {
  response.set(http::field::server, "fovea/" FOVEA_VERSION);
  response.set(http::field::content_type, beast::string_view(type.data(), type.size()));
  for (const auto& [name, value] : headers) response.set(name, value);
}

}  // namespace

HttpConnection::HttpConnection(asio::ip::tcp::socket socket,
                               std::shared_ptr<ConnectionSharing> shared)
    : stream_(std::move(socket)), shared_(std::move(shared)) {
  error_code ignored;
  stream_.socket().non_blocking(true, ignored);  // for send_now()
  shared_->connections.insert(this);
}

HttpConnection::~HttpConnection() {
  stop_watching();
  shared_->connections.erase(this);
}

asio::awaitable<void> HttpConnection::run() {
  if (shared_->connections.size() > static_cast<size_t>(shared_->limits.connections)) {
    co_await refuse(503, "the server has too many connections");
    co_return;
  }
  while (keep_alive_ && !shared_->closing) {
    const bool more = co_await wait_for_request();  // g++ 12 fails at a co_await behind &&
    if (!more) co_return;
    idle_ = false;
    std::optional<HttpRequest> request = co_await read();
    if (!request) co_return;
    started_ = answered_ = false;
    watch_for_close();
    co_await shared_->handlers.request(*request, *this);
    stop_watching();
    if (!answered_) co_return;
    idle_ = true;
  }
  error_code ignored;
  stream_.socket().shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
}

void HttpConnection::close_if_idle() {
  if (idle_) stream_.cancel();
}

// Waits for the first byte of a request. Returns false at the end of the connection.
asio::awaitable<bool> HttpConnection::wait_for_request() {
  if (buffer_.size() > 0) co_return true;
  error_code error;
  stream_.expires_after(shared_->limits.idle_timeout);
  const size_t bytes = co_await stream_.async_read_some(buffer_.prepare(1024), with_error(error));
  buffer_.commit(bytes);
  co_return !error;
}

asio::awaitable<std::optional<HttpRequest>> HttpConnection::read() {
  const HttpLimits& limits = shared_->limits;
  Parser parser;
  parser.header_limit(limits.header_bytes);
  parser.body_limit(limits.body_bytes);
  error_code error;
  {
    const Deadline deadline(stream_, limits.header_timeout);
    co_await http::async_read_header(stream_, buffer_, parser, with_error(error));
    if (deadline.expired()) error = beast::error::timeout;
  }
  if (!error && beast::iequals(parser.get()[http::field::expect], "100-continue")) {
    static constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
    co_await asio::async_write(stream_, asio::buffer(kContinue), with_error(error));
  }
  if (!error) {
    const Deadline deadline(stream_, limits.body_timeout);
    co_await http::async_read(stream_, buffer_, parser, with_error(error));
    if (deadline.expired()) error = beast::error::timeout;
  }
  if (error) {
    const int status = status_of(error);
    const std::string what = error.message();
    if (status != 0) co_await refuse(status, what);
    co_return std::nullopt;
  }
  version_ = parser.get().version();
  keep_alive_ = parser.get().keep_alive();
  HttpRequest request = take_request(parser);
  if (buffer_.size() == 0) buffer_ = {};  // idle connections hold no memory
  co_return request;
}

// Answers something that is no request, and ends the connection.
asio::awaitable<void> HttpConnection::refuse(int status, std::string_view what) {
  keep_alive_ = false;
  asio::awaitable<void> answered = answer(shared_->handlers.refusal(status, std::string(what)));
  co_await std::move(answered);
  error_code ignored;
  stream_.socket().shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  co_await discard_input();
}

asio::awaitable<void> HttpConnection::discard_input() {
  std::array<char, 4096> scratch;
  error_code error;
  stream_.expires_after(kDiscardTimeout);
  for (size_t total = 0; !error && total < kMaxDiscarded;) {
    const size_t bytes = co_await stream_.async_read_some(asio::buffer(scratch), with_error(error));
    total += bytes;
  }
}

asio::awaitable<void> HttpConnection::answer(HttpAnswer given) {
  http::response<http::string_body> response;
  response.result(static_cast<unsigned>(given.status));
  response.version(version_);
  response.keep_alive(keep_alive_);
  add_headers(response, given.type, given.headers);
  response.body() = std::move(given.body);
  response.prepare_payload();
  stream_.expires_after(shared_->limits.write_timeout);
  started_ = true;
  co_await http::async_write(stream_, response, use_awaitable);
  answered_ = true;
}

asio::awaitable<void> HttpConnection::begin_stream(std::string_view type,
                                                   const HttpHeaders& headers) {
  http::response<http::empty_body> response;
  response.version(version_);
  if (version_ < 11) keep_alive_ = false;  // HTTP/1.0 has no chunks: the end of the connection ends
  response.keep_alive(keep_alive_);
  add_headers(response, type, headers);
  response.set(http::field::cache_control, "no-cache");
  response.chunked(version_ >= 11);
  http::response_serializer<http::empty_body> serializer(response);
  stream_.expires_after(shared_->limits.write_timeout);
  started_ = true;
  co_await http::async_write_header(stream_, serializer, use_awaitable);
}

asio::awaitable<void> HttpConnection::write(std::string_view text) {
  if (text.empty()) co_return;  // an empty chunk would end the stream
  const bool chunked = version_ >= 11;
  const std::string begin = chunked ? fmt::format("{:x}\r\n", text.size()) : std::string();
  const std::string_view end = chunked ? "\r\n" : "";
  const std::array<asio::const_buffer, 3> parts = {asio::buffer(begin), asio::buffer(text),
                                                   asio::buffer(end)};
  // g++ 12 destroys some temporaries of a co_await twice, so objects have names.
  const auto rest = send_now(stream_, parts);
  if (asio::buffer_size(rest) == 0) co_return;
  stream_.expires_after(shared_->limits.write_timeout);
  co_await asio::async_write(stream_, rest, use_awaitable);
}

asio::awaitable<void> HttpConnection::end_stream() {
  stream_.expires_after(shared_->limits.write_timeout);
  if (version_ >= 11) {
    const auto last = http::make_chunk_last();
    co_await asio::async_write(stream_, last, use_awaitable);
  }
  answered_ = true;
}

// While a request is answered, nobody reads. Notices that the client is gone by a wait for input
// that finds the end of it.
void HttpConnection::watch_for_close() {
  watch_ = std::make_shared<Watch>();
  watch_->connection = this;
  stream_.socket().async_wait(
      asio::ip::tcp::socket::wait_read, [watch = watch_](const error_code& error) {
        HttpConnection* const connection = watch->connection;
        if (connection == nullptr || error == asio::error::operation_aborted) return;
        char byte = 0;
        const ssize_t got =
            recv(connection->stream_.socket().native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
        const bool open = got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK));
        // A client that sends its next request already is not watched further.
        if (!open) connection->tell_closed();
      });
}

void HttpConnection::tell_closed() {
  closed_ = true;
  if (on_close_) std::exchange(on_close_, {})();
}

void HttpConnection::close() {
  tell_closed();
  error_code ignored;
  stream_.socket().close(ignored);
}

void HttpConnection::on_close(std::function<void()> callback) {
  if (closed_) return callback();
  on_close_ = std::move(callback);
}

void HttpConnection::stop_watching() {
  on_close_ = {};
  if (!watch_) return;
  watch_->connection = nullptr;
  watch_.reset();
  error_code ignored;
  stream_.socket().cancel(ignored);
}

asio::awaitable<void> serve_connection(asio::ip::tcp::socket socket,
                                       std::shared_ptr<ConnectionSharing> shared) {
  HttpConnection connection(std::move(socket), std::move(shared));
  try {
    co_await connection.run();
  } catch (const std::exception&) {
    // The client is gone, or a handler failed: the connection ends.
  }
}

}  // namespace fovea::server
