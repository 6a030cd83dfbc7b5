// SPDX-License-Identifier: Apache-2.0
#include "engine/generate.h"

#include <algorithm>
#include <iterator>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "engine/text_engine.h"

namespace fovea {
namespace {

// Calls add() and names the request's index in errors.
int64_t add_numbered(Engine& engine, std::span<const GenerateRequest> requests, size_t i) {
  try {
    return engine.add(requests[i]);
  } catch (const Error& error) {
    if (requests.size() == 1) throw;
    throw Error(error.code(),
                fmt::format("request {} of {}: {}", i + 1, requests.size(), error.what()));
  }
}

}  // namespace

void append_event(GenerateResult& result, const TokenEvent& event, bool logprobs) {
  result.text += event.text;
  if (event.token >= 0) {
    result.tokens.push_back(event.token);
    if (logprobs) {
      result.logprobs.push_back(event.logprob);
      result.top.push_back(event.top);
    }
  }
  if (event.finish == FinishReason::none) return;
  result.finish = event.finish;
  result.error = event.error;
  result.prompt_tokens = event.prompt_tokens;
  result.cached_tokens = event.cached_tokens;
  result.prompt_logprobs = event.prompt_logprobs;
}

std::vector<GenerateResult> TextEngine::generate(
    std::span<const GenerateRequest> requests,
    const std::function<void(const TokenEvent&)>& on_token, const std::function<bool()>& stop) {
  return generate_by_steps({*this, next_id_, events_}, requests, on_token, stop);
}

std::vector<GenerateResult> generate_by_steps(
    const GenerateLoop& loop, std::span<const GenerateRequest> requests,
    const std::function<void(const TokenEvent&)>& on_token, const std::function<bool()>& stop) {
  Engine& engine = loop.engine;
  std::vector<GenerateResult> results(requests.size());
  std::unordered_map<int64_t, size_t> index_of;
  const auto is_own = [&](const TokenEvent& event) { return index_of.contains(event.request); };
  std::vector<TokenEvent> other_events;  // events of requests that add() queued
  const auto return_other_events = [&] {
    loop.events.insert(loop.events.begin(), std::make_move_iterator(other_events.begin()),
                       std::make_move_iterator(other_events.end()));
  };
  try {
    for (size_t i = 0; i < requests.size(); ++i) {
      // Comes first, so that the handler below cancels what add() queued.
      index_of.emplace(loop.next_id, i);
      results[i].request = add_numbered(engine, requests, i);
    }
    for (size_t unfinished = requests.size(); unfinished > 0;) {
      if (stop && stop()) {
        for (const GenerateResult& result : results) engine.cancel(result.request);
      }
      check_argument(!engine.idle(),
                     "requests of generate() ended in a step() that on_token called");
      std::vector<TokenEvent> events = engine.step();
      // Comes before any callback, which may throw.
      const auto others = std::stable_partition(events.begin(), events.end(), is_own);
      other_events.insert(other_events.end(), std::make_move_iterator(others),
                          std::make_move_iterator(events.end()));
      events.erase(others, events.end());
      for (const TokenEvent& event : events) {
        const size_t index = index_of.at(event.request);
        append_event(results[index], event, requests[index].sampling.logprobs >= 0);
        unfinished -= event.finish != FinishReason::none;
        if (on_token) on_token(event);
      }
    }
  } catch (...) {
    for (const auto& [id, index] : index_of) engine.cancel(id);
    std::erase_if(loop.events, is_own);
    return_other_events();
    throw;
  }
  return_other_events();
  return results;
}

}  // namespace fovea
