// SPDX-License-Identifier: Apache-2.0
#include "server/serve.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/ip/address.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <csignal>
#include <cstdio>

#include "core/check.h"
#include "server/api_server.h"

namespace fovea::server {
namespace {

// Connections take file descriptors, and shells often allow 1024.
void raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  (void)setrlimit(RLIMIT_NOFILE, &limit);
}

bool is_loopback(const std::string& host) {
  if (host == "localhost") return true;
  boost::system::error_code error;
  const auto address = asio::ip::make_address(host, error);
  return !error && address.is_loopback();
}

void check_options(const ServeOptions& options) {
  for (const std::string& key : options.api_keys) {
    check_argument(key.size() >= 8, "an API key has {} bytes, must have at least 8", key.size());
  }
  check_argument(!options.model.empty(), "the model's name is empty");
}

// Ends the server: answers what is there, closes what does not end in time.
asio::awaitable<void> end_on_signal(asio::signal_set& signals, asio::io_context& io,
                                    HttpServer& http, EngineService& service,
                                    std::chrono::seconds timeout) {
  co_await signals.async_wait(asio::use_awaitable);
  service.drain();
  http.stop_listening();
  http.close_idle();
  asio::steady_timer pause(io);
  const auto wait = [&](std::chrono::milliseconds time) {
    pause.expires_after(time);
    return pause.async_wait(asio::use_awaitable);
  };
  constexpr std::chrono::milliseconds kLook{10};
  bool again = false;  // a second signal waits for nothing
  signals.async_wait([&](const boost::system::error_code& error, int) { again = again || !error; });
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (http.connections() > 0 && !again && std::chrono::steady_clock::now() < deadline)
    co_await wait(kLook);
  http.close_all();
  while (http.connections() > 0) co_await wait(kLook);
  io.stop();
}

}  // namespace

void serve(std::unique_ptr<Engine> engine, const ServeOptions& options,
           const std::function<void(uint16_t port)>& on_ready) {
  check_options(options);
  raise_descriptor_limit();
  std::signal(SIGPIPE, SIG_IGN);  // a client that is gone is an error of the write
  asio::io_context io(1);
  Mailroom mailroom(io);
  EngineService service(std::move(engine),
                        {.max_running = options.max_running,
                         .max_waiting = options.max_waiting,
                         .after_step = [&] { mailroom.deliver(); },
                         .on_failure =
                             [](const std::string& what) {
                               std::fputs(fmt::format("fovea: a pass failed: {}\n", what).c_str(),
                                          stderr);
                             }});
  ApiServer api(service, mailroom,
                {options.model, options.api_keys, is_loopback(options.host), options.hosts});
  HttpServer http(
      io, options.host, options.port, options.http,
      {.request = [&](HttpRequest& request,
                      HttpClient& client) { return api.handle(request, client); },
       .refusal = [&](int status, const std::string& what) { return api.refusal(status, what); }});
  api.count_connections_by([&] { return http.connections(); });
  asio::signal_set signals(io, SIGTERM, SIGINT);
  asio::co_spawn(io, end_on_signal(signals, io, http, service, options.drain_timeout),
                 asio::detached);
  on_ready(http.port());
  io.run();
}

}  // namespace fovea::server
