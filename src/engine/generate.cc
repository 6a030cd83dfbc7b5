// SPDX-License-Identifier: Apache-2.0
// Engine::generate, a loop over add() and step().
#include <iterator>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "engine/text_engine.h"

namespace fovea {
namespace {

void append(GenerateResult& result, const TokenEvent& event, bool logprobs) {
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
  result.prompt_tokens = event.prompt_tokens;
  result.cached_tokens = event.cached_tokens;
  result.prompt_logprobs = event.prompt_logprobs;
}

// add() whose errors say which of several requests they are about.
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

std::vector<GenerateResult> TextEngine::generate(
    std::span<const GenerateRequest> requests,
    const std::function<void(const TokenEvent&)>& on_token, const std::function<bool()>& stop) {
  std::vector<GenerateResult> results(requests.size());
  std::unordered_map<int64_t, size_t> index_of;
  std::vector<TokenEvent> foreign;  // of requests that add() queued before
  try {
    for (size_t i = 0; i < requests.size(); ++i) {
      results[i].request = add_numbered(*this, requests, i);
      index_of[results[i].request] = i;
    }
    for (size_t unfinished = requests.size(); unfinished > 0;) {
      if (stop && stop()) {
        for (const GenerateResult& result : results) cancel(result.request);
      }
      for (TokenEvent& event : step()) {
        const auto found = index_of.find(event.request);
        if (found == index_of.end()) {
          foreign.push_back(std::move(event));
          continue;
        }
        append(results[found->second], event, requests[found->second].sampling.logprobs >= 0);
        unfinished -= event.finish != FinishReason::none;
        if (on_token) on_token(event);
      }
    }
  } catch (...) {
    for (const auto& [id, index] : index_of) cancel(id);
    std::erase_if(events_,
                  [&](const TokenEvent& event) { return index_of.contains(event.request); });
    events_.insert(events_.begin(), std::make_move_iterator(foreign.begin()),
                   std::make_move_iterator(foreign.end()));
    throw;
  }
  events_.insert(events_.begin(), std::make_move_iterator(foreign.begin()),
                 std::make_move_iterator(foreign.end()));
  return results;
}

}  // namespace fovea
