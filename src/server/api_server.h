// SPDX-License-Identifier: Apache-2.0
// The endpoints: answers requests with the engine.
#pragma once

#include <boost/asio/thread_pool.hpp>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "core/sha256.h"
#include "server/api_error.h"
#include "server/completion_answer.h"
#include "server/http.h"
#include "server/inbox.h"
#include "server/metrics.h"

namespace fovea::server {

struct ApiOptions {
  std::string model;                     // the name clients use
  std::vector<std::string> api_keys;     // empty: none is needed
  bool loopback = true;                  // bound to this machine alone
  std::vector<std::string> other_hosts;  // values of Host besides those of this machine
};

// Runs on one thread, except for the parsing of bodies.
class ApiServer {
 public:
  // `service` and `mailroom` must outlive this; the mailroom delivers the service's events.
  ApiServer(EngineService& service, Mailroom& mailroom, ApiOptions options);

  asio::awaitable<void> handle(HttpRequest& request, HttpClient& client);
  // Answers something that is no HTTP request.
  HttpAnswer refusal(int status, const std::string& what);
  // Tells the number of connections for /metrics.
  void count_connections_by(std::function<int64_t()> count) { connections_ = std::move(count); }

 private:
  struct Route;
  struct Progress;
  static const std::vector<Route>& routes();

  asio::awaitable<void> reply_error(HttpClient& client, const ApiError& error);
  asio::awaitable<void> dispatch(HttpRequest& request, HttpClient& client);
  void check_origin(const HttpRequest& request) const;
  void check_key(const HttpRequest& request) const;
  void check_model(const std::string& name) const;
  asio::awaitable<void> reply(HttpClient& client, HttpAnswer&& answer);

  asio::awaitable<void> completions(HttpRequest& request, HttpClient& client);
  asio::awaitable<void> chat(HttpRequest& request, HttpClient& client);
  asio::awaitable<void> models(HttpRequest& request, HttpClient& client);
  asio::awaitable<void> tokenize(HttpRequest& request, HttpClient& client);
  asio::awaitable<void> detokenize(HttpRequest& request, HttpClient& client);
  asio::awaitable<void> tokenizer_info(HttpRequest& request, HttpClient& client);
  asio::awaitable<void> health(HttpRequest& request, HttpClient& client);
  asio::awaitable<void> metrics(HttpRequest& request, HttpClient& client);
  asio::awaitable<void> server_info(HttpRequest& request, HttpClient& client);
  asio::awaitable<void> flush_cache(HttpRequest& request, HttpClient& client);
  asio::awaitable<void> page(HttpRequest& request, HttpClient& client);

  asio::awaitable<void> complete(Dialect dialect, HttpRequest& request, HttpClient& client);
  std::vector<int64_t> submit(const CompletionRequest& request,
                              const std::shared_ptr<Inbox>& inbox);
  asio::awaitable<void> answer_completion(const CompletionRequest& request, HttpClient& client,
                                          Inbox& inbox, HttpHeaders& headers);
  asio::awaitable<void> end_stream(HttpClient& client, const CompletionAnswer& answer);
  asio::awaitable<void> end_answer(HttpClient& client, const CompletionAnswer& answer,
                                   const HttpHeaders& headers);
  void count(const TokenEvent& event, Progress& progress, size_t choice);
  std::string new_id();

  EngineService& service_;
  Mailroom& mailroom_;
  ApiOptions options_;
  std::vector<Sha256::Digest> keys_;
  int64_t created_;
  Metrics metrics_;
  std::function<int64_t()> connections_;
  std::mt19937_64 random_;
  asio::thread_pool parsers_{2};
};

}  // namespace fovea::server
