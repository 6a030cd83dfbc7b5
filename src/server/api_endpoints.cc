// SPDX-License-Identifier: Apache-2.0
// The endpoints besides completions.
#include <nlohmann/json.hpp>

#include "fovea/error.h"
#include "fovea/version.h"
#include "server/api_server.h"
#include "server/chat_messages.h"
#include "server/fields.h"
#include "server/json_text.h"
#include "server/page.h"
#include "server/run_on.h"
#include "server/tools.h"
#include "tokenizer/utf8.h"

namespace fovea::server {
namespace {

using nlohmann::json;

HttpAnswer json_answer(const json& body) { return {200, "application/json", json_text(body), {}}; }

std::vector<int32_t> tokens_of(Fields& body, const Engine& engine) {
  const json* const prompt = body.find("prompt");
  if (prompt == nullptr) return read_conversation(body, engine, read_tool_list(body));
  try {
    if (!prompt->is_string()) refuse("prompt", "prompt is {}, must be a string", shown(*prompt));
    const auto& text = prompt->get_ref<const std::string&>();
    return body.boolean("add_special_tokens").value_or(true) ? engine.encode(text)
                                                             : engine.encode_bare(text);
  } catch (const Error& error) {
    refuse("prompt", "{}", error.what());
  }
}

json tokenized(const std::string& text, const Engine& engine) {
  const auto document = parse_body(text);
  Fields body = Fields::of_body(*document, text);
  const std::vector<int32_t> tokens = tokens_of(body, engine);
  json answer = {{"count", tokens.size()},
                 {"max_model_len", engine.max_context()},
                 {"tokens", tokens},
                 {"token_strs", nullptr}};
  if (body.boolean("return_token_strs").value_or(false)) {
    json texts = json::array();
    for (const int32_t token : tokens)
      texts.push_back(replace_broken_utf8(engine.token_bytes(token)));
    answer["token_strs"] = std::move(texts);
  }
  return answer;
}

json detokenized(const std::string& text, const Engine& engine) {
  const auto document = parse_body(text);
  Fields body(*document);
  const json* const tokens = body.find("tokens");
  if (tokens == nullptr) refuse("tokens", "tokens is missing");
  json answer = json::object();
  answer["prompt"] = engine.decode(read_tokens(*tokens, "tokens", engine.vocabulary()));
  return answer;
}

}  // namespace

asio::awaitable<void> ApiServer::models(HttpRequest& request, HttpClient& client) {
  const json model = {{"id", options_.model},
                      {"object", "model"},
                      {"created", created_},
                      {"owned_by", "fovea"},
                      {"root", options_.model},
                      {"parent", nullptr},
                      {"max_model_len", service_.engine().max_context()}};
  constexpr std::string_view kPrefix = "/v1/models/";
  if (!request.path.starts_with(kPrefix)) {
    return reply(client, json_answer({{"object", "list"}, {"data", json::array({model})}}));
  }
  check_model(request.path.substr(kPrefix.size()));
  return reply(client, json_answer(model));
}

asio::awaitable<void> ApiServer::tokenize(HttpRequest& request, HttpClient& client) {
  const json answer =
      co_await run_on(parsers_, [&] { return tokenized(request.body, service_.engine()); });
  HttpAnswer whole = json_answer(answer);
  co_await reply(client, std::move(whole));
}

asio::awaitable<void> ApiServer::detokenize(HttpRequest& request, HttpClient& client) {
  const json answer =
      co_await run_on(parsers_, [&] { return detokenized(request.body, service_.engine()); });
  HttpAnswer whole = json_answer(answer);
  co_await reply(client, std::move(whole));
}

asio::awaitable<void> ApiServer::tokenizer_info(HttpRequest&, HttpClient& client) {
  const Engine& engine = service_.engine();
  json answer = {{"tokenizer_class", "fovea"},
                 {"vocab_size", engine.vocabulary()},
                 {"model_max_length", engine.max_context()},
                 {"eos_token", nullptr},
                 {"eos_token_ids",
                  std::vector<int32_t>(engine.end_tokens().begin(), engine.end_tokens().end())}};
  if (!engine.end_tokens().empty())
    answer["eos_token"] = replace_broken_utf8(engine.token_bytes(engine.end_tokens().front()));
  return reply(client, json_answer(answer));
}

asio::awaitable<void> ApiServer::health(HttpRequest&, HttpClient& client) {
  if (!service_.stats().healthy) throw ApiError(503, "", "the last pass of the model failed");
  if (service_.draining()) throw ApiError(503, "", "the server is shutting down");
  return reply(client, {200, "text/plain", "", {}});
}

asio::awaitable<void> ApiServer::metrics(HttpRequest&, HttpClient& client) {
  return reply(client, {200,
                        "text/plain; version=0.0.4; charset=utf-8",
                        metrics_.text(service_.stats(), connections_ ? connections_() : 0),
                        {}});
}

asio::awaitable<void> ApiServer::server_info(HttpRequest&, HttpClient& client) {
  const ServiceStats stats = service_.stats();
  const Engine& engine = service_.engine();
  const json state = {{"running", stats.running},
                      {"waiting", stats.waiting},
                      {"kv_pages", stats.engine.kv_pages},
                      {"kv_pages_free", stats.engine.kv_pages_free},
                      {"memory_bytes", stats.engine.memory.total()}};
  return reply(client, json_answer({{"version", FOVEA_VERSION},
                                    {"model", options_.model},
                                    {"max_model_len", engine.max_context()},
                                    {"max_waiting", service_.max_waiting()},
                                    // Benchmarks made for SGLang read a list.
                                    {"internal_states", json::array({state})}}));
}

asio::awaitable<void> ApiServer::flush_cache(HttpRequest&, HttpClient& client) {
  service_.clear_prefix_cache();
  return reply(client, {200, "text/plain", "prefix cache cleared\n", {}});
}

asio::awaitable<void> ApiServer::page(HttpRequest&, HttpClient& client) {
  return reply(client, {200,
                        "text/html; charset=utf-8",
                        std::string(chat_page()),
                        {{"content-security-policy", std::string(page_policy())}}});
}

}  // namespace fovea::server
