// SPDX-License-Identifier: Apache-2.0
// /v1/completions and /v1/chat/completions.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "server/api_server.h"
#include "server/run_on.h"

namespace fovea::server {
namespace {

// The coroutines below hold what a waiting stream needs and no more: the objects of their ends live
// in coroutines of their own.

// Cancels the requests of an answer that ends early: the client is gone, or a write failed.
class CancelGuard {
 public:
  CancelGuard(EngineService& service, std::vector<int64_t> ids)
      : service_(service), ids_(std::move(ids)) {}
  ~CancelGuard() {
    if (!ids_.empty()) service_.cancel(ids_);
  }
  CancelGuard(const CancelGuard&) = delete;
  CancelGuard& operator=(const CancelGuard&) = delete;
  void release() { ids_.clear(); }

 private:
  EngineService& service_;
  std::vector<int64_t> ids_;
};

constexpr size_t kMaxIgnoredShown = 16;

// Names the fields that the server does not know, as far as a header can hold them.
std::string ignored_names(const std::vector<std::string>& names) {
  std::string shown;
  size_t count = 0;
  for (const std::string& name : names) {
    const bool plain = !name.empty() && name.size() <= 64 && std::ranges::all_of(name, [](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-';
    });
    if (!plain || ++count > kMaxIgnoredShown) continue;
    shown += (shown.empty() ? "" : ", ") + name;
  }
  return shown.empty() ? "some" : shown;
}

bool is_plain_id(std::string_view id) {
  return !id.empty() && id.size() <= 128 &&
         std::ranges::all_of(id, [](char c) { return c > ' ' && c <= '~'; });
}

HttpHeaders answer_headers(const CompletionRequest& request, std::string id) {
  HttpHeaders headers = {{"x-request-id", std::move(id)}};
  if (!request.ignored.empty())
    headers.emplace_back("x-fovea-ignored-fields", ignored_names(request.ignored));
  return headers;
}

std::string failed_body(const CompletionAnswer& answer) {
  return ApiError(500, "", "the request failed: " + *answer.failure()).body();
}

}  // namespace

// When an answer's tokens arrived. Counts the choices that have not ended when the answer ends: the
// client is gone, or a write failed, which throws.
struct ApiServer::Progress {
  Progress(Metrics& to, size_t choices) : metrics(to), last(choices) {}
  ~Progress() {
    for (; ended < last.size(); ++ended)
      metrics.count_end(FinishReason::cancelled, Metrics::Clock::now() - arrival);
  }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  Metrics& metrics;
  Metrics::Clock::time_point arrival = Metrics::Clock::now();
  std::vector<std::optional<Metrics::Clock::time_point>> last;  // per choice
  size_t ended = 0;                                             // number of choices
};

asio::awaitable<void> ApiServer::completions(HttpRequest& request, HttpClient& client) {
  return complete(Dialect::completions, request, client);
}

asio::awaitable<void> ApiServer::chat(HttpRequest& request, HttpClient& client) {
  return complete(Dialect::chat, request, client);
}

asio::awaitable<void> ApiServer::complete(Dialect dialect, HttpRequest& http, HttpClient& client) {
  if (service_.draining()) throw ApiError(503, "", "the server is shutting down");
  const CompletionRequest request = co_await run_on(
      parsers_, [&] { return read_completion(dialect, http.body, service_.engine()); });
  check_model(request.model);
  const auto inbox = std::make_shared<Inbox>(mailroom_);
  CancelGuard guard(service_, submit(request, inbox));
  client.on_close([inbox] { inbox->close(); });
  const std::string_view id = http.header("x-request-id");
  HttpHeaders headers = answer_headers(request, is_plain_id(id) ? std::string(id) : new_id());
  http = {};  // thousands of streams may wait
  co_await answer_completion(request, client, *inbox, headers);
  if (!inbox->closed()) guard.release();
}

std::vector<int64_t> ApiServer::submit(const CompletionRequest& request,
                                       const std::shared_ptr<Inbox>& inbox) {
  std::vector<ServiceRequest> requests = request.requests(random_());
  for (size_t i = 0; i < requests.size(); ++i)
    requests[i].on_event = [inbox, i](TokenEvent event) { inbox->put(i, std::move(event)); };
  const size_t count = requests.size();
  std::vector<int64_t> ids = service_.add(std::move(requests));
  if (!ids.empty()) {
    for (const CompletionPrompt& prompt : request.prompts)
      metrics_.count_prompts(static_cast<int64_t>(prompt.tokens.size()));
    return ids;
  }
  if (service_.draining()) throw ApiError(503, "", "the server is shutting down");
  const auto limit = static_cast<size_t>(service_.max_waiting());
  if (count > limit) {
    refuse("n", "the request has {} choices, the queue holds {}", count, limit);
  }
  throw ApiError(429, "", "the queue is full; try again later");
}

asio::awaitable<void> ApiServer::answer_completion(const CompletionRequest& request,
                                                   HttpClient& client, Inbox& inbox,
                                                   HttpHeaders& headers) {
  const bool chat = request.dialect == Dialect::chat;
  const auto now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  CompletionAnswer answer(request, service_.engine(), options_.model,
                          (chat ? "chatcmpl-" : "cmpl-") + new_id(), now);
  Progress progress(metrics_, request.prompts.size() * static_cast<size_t>(request.best_of));
  if (request.stream) {
    metrics_.count_answer(200);
    co_await client.begin_stream("text/event-stream; charset=utf-8", headers);
    headers = {};
  }
  while (!answer.finished() && !answer.failure()) {
    std::vector<Inbox::Mail> mail = co_await inbox.take();
    if (inbox.closed()) co_return;
    std::string text;
    for (auto& [choice, event] : mail) {
      count(event, progress, choice);
      text += answer.add(choice, std::move(event));
    }
    co_await client.write(text);
  }
  if (request.stream) {
    co_await end_stream(client, answer);
  } else {
    co_await end_answer(client, answer, headers);
  }
}

asio::awaitable<void> ApiServer::end_stream(HttpClient& client, const CompletionAnswer& answer) {
  const std::string last = answer.failure()
                               ? "data: " + failed_body(answer) + "\n\ndata: [DONE]\n\n"
                               : answer.stream_end();
  co_await client.write(last);
  co_await client.end_stream();
}

asio::awaitable<void> ApiServer::end_answer(HttpClient& client, const CompletionAnswer& answer,
                                            const HttpHeaders& headers) {
  const bool failed = answer.failure().has_value();
  return reply(client, {failed ? 500 : 200, "application/json",
                        failed ? failed_body(answer) : answer.body(), headers});
}

void ApiServer::count(const TokenEvent& event, Progress& progress, size_t choice) {
  const auto now = Metrics::Clock::now();
  if (event.token >= 0) {
    auto& last = progress.last[choice];
    if (last) {
      metrics_.count_next_token(now - *last);
    } else {
      metrics_.count_first_token(now - progress.arrival);
    }
    last = now;
  }
  if (event.finish == FinishReason::none) return;
  ++progress.ended;
  metrics_.count_end(event.finish, now - progress.arrival);
}

}  // namespace fovea::server
