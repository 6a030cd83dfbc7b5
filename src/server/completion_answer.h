// SPDX-License-Identifier: Apache-2.0
// Turns the events of a request into the JSON of its answer, whole or as a stream.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "server/completion_request.h"
#include "server/logprobs.h"
#include "server/tool_output.h"

namespace fovea::server {

class CompletionAnswer {
 public:
  // `request` and `engine` must outlive this. `model` is the name in the answer.
  CompletionAnswer(const CompletionRequest& request, const Engine& engine, std::string model,
                   std::string id, int64_t created);

  // Adds the next event of a choice: the index of its request in CompletionRequest::requests().
  // Returns the text of the stream's events for it, or nothing if the answer is not streamed.
  std::string add(size_t choice, TokenEvent event);
  bool finished() const { return unfinished_ == 0; }
  // Returns the message of a choice that failed. The whole answer fails with it.
  const std::optional<std::string>& failure() const { return failure_; }

  std::string body() const;        // the whole answer, once it is finished
  std::string stream_end() const;  // the last events of a stream
  int64_t prompt_tokens() const;
  int64_t output_tokens() const;

 private:
  struct Call {
    std::string id, name, arguments;
  };
  struct Choice {
    std::unique_ptr<ToolOutput> tools;  // set in chats with tools
    std::vector<Call> calls;
    std::string text;
    std::vector<int32_t> tokens;
    std::vector<ScoredToken> scored, prompt_scored;
    double logprob = 0;  // sum over the tokens
    int64_t offset = 0;  // characters before the next token
    int32_t cached_tokens = 0;
    FinishReason finish = FinishReason::none;
    std::optional<int32_t> stop_token;  // the token of stop_token_ids that ended the choice
    bool started = false;               // the stream has its first event
  };

  const CompletionPrompt& prompt_of(size_t choice) const;
  void keep(Choice& choice, size_t index, TokenEvent& event);
  std::string first_events(size_t index, Choice& choice);
  // `delta` is the JSON of what the event adds.
  std::string event_for(size_t index, Choice& choice, const TokenEvent& event,
                        const std::string& delta);
  std::string delta_for(Choice& choice, const TokenEvent& event,
                        const std::vector<CallPart>& calls);
  void keep_calls(Choice& choice, const std::vector<CallPart>& calls);
  nlohmann::json message_json(const Choice& choice) const;
  std::string new_call_id();
  nlohmann::json choice_json(size_t index, int32_t shown_index) const;
  nlohmann::json logprobs_json(std::span<const ScoredToken> tokens, int64_t& offset) const;
  nlohmann::json usage_json(int64_t prompt_tokens, int64_t output_tokens, bool whole) const;
  std::string event_text(const std::string& choice, const nlohmann::json* usage) const;
  std::vector<size_t> shown_choices() const;

  const CompletionRequest& request_;
  const Engine& engine_;
  std::string head_;  // the fields of every object, without the closing brace
  LogprobStyle style_;
  uint64_t random_;  // for ids of calls
  std::vector<Choice> choices_;
  size_t unfinished_ = 0;
  std::optional<std::string> failure_;
};

}  // namespace fovea::server
