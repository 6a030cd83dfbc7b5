// SPDX-License-Identifier: Apache-2.0
#include "server/api_server.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "server/fields.h"

namespace fovea::server {
namespace {

Sha256::Digest digest_of(std::string_view text) {
  return Sha256().update(text.data(), text.size()).finish();
}

// Takes the same time for any digests.
bool equal(const Sha256::Digest& a, const Sha256::Digest& b) {
  unsigned different = 0;
  for (size_t i = 0; i < a.size(); ++i) different |= static_cast<unsigned>(a[i] ^ b[i]);
  return different == 0;
}

// Removes the port of "localhost:8000" and "[::1]:8000".
std::string_view host_name(std::string_view host) {
  const size_t colon = host.rfind(':');
  if (colon == host.npos || host.find(']', colon) != host.npos) return host;
  return host.substr(0, colon);
}

HttpAnswer error_answer(const ApiError& error) {
  HttpAnswer answer{error.status(), "application/json", error.body(), {}};
  if (error.status() == 429 || error.status() == 503)
    answer.headers.emplace_back("retry-after", "1");
  if (error.status() == 401) answer.headers.emplace_back("www-authenticate", "Bearer");
  return answer;
}

}  // namespace

struct ApiServer::Route {
  std::string_view path;  // one that ends in '/' and is longer is a prefix
  std::string_view method;
  asio::awaitable<void> (ApiServer::*handle)(HttpRequest&, HttpClient&);
  bool needs_key = true;

  bool matches(std::string_view given) const {
    return path.size() > 1 && path.ends_with('/') ? given.starts_with(path) : given == path;
  }
};

const std::vector<ApiServer::Route>& ApiServer::routes() {
  static const std::vector<Route> all = {
      {"/v1/completions", "POST", &ApiServer::completions},
      {"/v1/chat/completions", "POST", &ApiServer::chat},
      {"/v1/models", "GET", &ApiServer::models},
      {"/v1/models/", "GET", &ApiServer::models},
      {"/tokenize", "POST", &ApiServer::tokenize},
      {"/detokenize", "POST", &ApiServer::detokenize},
      {"/tokenizer_info", "GET", &ApiServer::tokenizer_info},
      {"/health", "GET", &ApiServer::health, false},
      {"/metrics", "GET", &ApiServer::metrics},
      {"/server_info", "GET", &ApiServer::server_info},
      {"/flush_cache", "POST", &ApiServer::flush_cache},
      {"/", "GET", &ApiServer::page, false},
  };
  return all;
}

ApiServer::ApiServer(EngineService& service, Mailroom& mailroom, ApiOptions options)
    : service_(service),
      mailroom_(mailroom),
      options_(std::move(options)),
      created_(std::chrono::system_clock::to_time_t(std::chrono::system_clock::now())) {
  for (const std::string& key : options_.api_keys) keys_.push_back(digest_of(key));
  std::random_device device;
  random_.seed((static_cast<uint64_t>(device()) << 32) | device());
}

HttpAnswer ApiServer::refusal(int status, const std::string& what) {
  metrics_.count_answer(status);
  return error_answer(ApiError(status, "", what));
}

asio::awaitable<void> ApiServer::handle(HttpRequest& request, HttpClient& client) {
  std::unique_ptr<ApiError> error;
  try {
    co_await dispatch(request, client);
  } catch (const ApiError& refused) {
    error = std::make_unique<ApiError>(refused);
  } catch (const boost::system::system_error&) {
    throw;  // the client is gone
  } catch (const std::exception& failure) {
    // The text may name files or addresses, so it is for the operator alone.
    std::fputs(
        fmt::format("fovea: {} {}: {}\n", request.method, "request failed", failure.what()).c_str(),
        stderr);
    if (client.started()) throw;
    error = std::make_unique<ApiError>(500, "", "the server failed to answer this request");
  }
  if (error) co_await reply_error(client, *error);
}

asio::awaitable<void> ApiServer::reply_error(HttpClient& client, const ApiError& error) {
  return reply(client, error_answer(error));
}

// No coroutine: a stream that waits needs no frame of it.
asio::awaitable<void> ApiServer::dispatch(HttpRequest& request, HttpClient& client) {
  check_origin(request);
  const Route* found = nullptr;
  std::string allowed;
  for (const Route& route : routes()) {
    if (!route.matches(request.path)) continue;
    allowed = route.method;
    if (route.method == request.method) found = &route;
  }
  if (found != nullptr) {
    if (found->needs_key) check_key(request);
    return (this->*found->handle)(request, client);
  }
  if (allowed.empty()) throw ApiError(404, "", "there is no such path");
  HttpAnswer answer = error_answer(ApiError(405, "", "this path takes " + allowed + " only"));
  answer.headers.emplace_back("allow", allowed);
  return reply(client, std::move(answer));
}

// Refuses pages of other sites: a browser sends their origin, and after a change of a name in DNS
// that name as the host.
void ApiServer::check_origin(const HttpRequest& request) const {
  const std::string_view host = request.header("host"), origin = request.header("origin");
  if (!origin.empty() && origin != fmt::format("http://{}", host) &&
      origin != fmt::format("https://{}", host)) {
    throw ApiError(403, "", "requests of other sites' pages are refused");
  }
  static constexpr std::array<std::string_view, 3> kOwn = {"localhost", "127.0.0.1", "[::1]"};
  const std::string_view name = host_name(host);
  if (!options_.loopback || !keys_.empty() || name.empty() ||
      std::ranges::find(kOwn, name) != kOwn.end() ||
      std::ranges::find(options_.other_hosts, name) != options_.other_hosts.end()) {
    return;
  }
  throw ApiError(403, "", "this server answers requests for localhost only (--allow-host)");
}

void ApiServer::check_key(const HttpRequest& request) const {
  if (keys_.empty()) return;
  std::string_view given = request.header("authorization");
  const bool bearer = given.starts_with("Bearer ");
  if (bearer) given.remove_prefix(7);
  const Sha256::Digest digest = digest_of(given);
  bool known = false;
  for (const Sha256::Digest& key : keys_) known |= equal(key, digest);
  if (!bearer || !known) throw ApiError(401, "", "the API key is missing or unknown");
}

void ApiServer::check_model(const std::string& name) const {
  if (name.empty() || name == options_.model) return;
  throw ApiError(404, "model", "the server has no such model; /v1/models names the one it has");
}

asio::awaitable<void> ApiServer::reply(HttpClient& client, HttpAnswer&& answer) {
  metrics_.count_answer(answer.status);
  answer.headers.emplace_back("x-content-type-options", "nosniff");
  return client.answer(std::move(answer));
}

std::string ApiServer::new_id() { return fmt::format("{:016x}{:016x}", random_(), random_()); }

}  // namespace fovea::server
