// SPDX-License-Identifier: Apache-2.0
#include "server/completion_answer.h"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "server/json_text.h"

namespace fovea::server {
namespace {

using nlohmann::json;

json finish_name(FinishReason finish, bool has_calls) {
  switch (finish) {
    case FinishReason::none:
      return nullptr;
    case FinishReason::stop:
      return has_calls ? "tool_calls" : "stop";
    case FinishReason::length:
      return "length";
    default:
      return "abort";
  }
}

}  // namespace

CompletionAnswer::CompletionAnswer(const CompletionRequest& request, const Engine& engine,
                                   std::string model, std::string id, int64_t created)
    : request_(request),
      engine_(engine),
      style_{&engine, request.logprobs, request.tokens_as_ids},
      random_(std::hash<std::string>()(id)),
      choices_(request.prompts.size() * static_cast<size_t>(request.best_of)),
      unfinished_(choices_.size()) {
  const bool chat = request.dialect == Dialect::chat;
  const char* const object =
      chat ? (request.stream ? "chat.completion.chunk" : "chat.completion") : "text_completion";
  head_ = fmt::format(R"({{"id":{},"object":"{}","created":{},"model":{})", json_text(id), object,
                      created, json_text(model));
  if (request.tools.use == ToolUse::none) return;
  for (Choice& choice : choices_)
    choice.tools = std::make_unique<ToolOutput>(request.tools, engine);
}

const CompletionPrompt& CompletionAnswer::prompt_of(size_t choice) const {
  return request_.prompts[choice / static_cast<size_t>(request_.best_of)];
}

std::string CompletionAnswer::add(size_t index, TokenEvent event) {
  Choice& choice = choices_[index];
  const bool last = event.finish != FinishReason::none;
  if (event.finish == FinishReason::failed) failure_ = event.error;
  if (request_.drops_output) {
    event.text.clear();
    event.token = -1;
    if (last) event.finish = FinishReason::length;
  }
  std::vector<CallPart> calls;
  if (choice.tools) {
    ToolOutput::Parts parts = choice.tools->add(event);
    event.text = std::move(parts.content);
    calls = std::move(parts.calls);
    keep_calls(choice, calls);
  } else if (request_.special_tokens && event.finish != FinishReason::stop) {
    event.text += special_text(engine_, event.token);  // the last token is no part of the answer
  }
  keep(choice, index, event);
  unfinished_ -= last;
  if (!request_.stream || failure_) return {};
  std::string events = first_events(index, choice);
  return events += event_for(index, choice, event, delta_for(choice, event, calls));
}

void CompletionAnswer::keep_calls(Choice& choice, const std::vector<CallPart>& calls) {
  for (const CallPart& part : calls) {
    if (part.name) choice.calls.push_back({new_call_id(), *part.name, {}});
    // The pieces of a stream are not kept.
    if (!request_.stream) choice.calls[part.index].arguments += part.arguments;
  }
}

// Some chat templates take ids of 9 letters and digits only. The bits come from splitmix64.
std::string CompletionAnswer::new_call_id() {
  static constexpr std::string_view kLetters =
      "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  uint64_t bits = random_ += 0x9e3779b97f4a7c15;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
  bits ^= bits >> 31;
  std::string id;
  for (; id.size() < 9; bits /= kLetters.size()) id += kLetters[bits % kLetters.size()];
  return id;
}

void CompletionAnswer::keep(Choice& choice, size_t index, TokenEvent& event) {
  if (event.token >= 0) {
    choice.tokens.push_back(event.token);
    choice.logprob += event.logprob;
    if (request_.logprobs >= 0 && !request_.stream)
      choice.scored.push_back({event.token, event.logprob, event.top});
  }
  if (!request_.stream) choice.text += event.text;
  if (event.finish == FinishReason::none) return;
  choice.finish = event.finish;
  choice.cached_tokens = event.cached_tokens;
  const auto& stops = request_.sampling.stop_tokens;
  if (event.finish == FinishReason::stop && std::ranges::find(stops, event.token) != stops.end())
    choice.stop_token = event.token;
  if (request_.sampling.prompt_logprobs)
    choice.prompt_scored = score_prompt(prompt_of(index).tokens, event);
}

// A chat's stream begins with the role, that of a completion with the prompt if it is echoed.
std::string CompletionAnswer::first_events(size_t index, Choice& choice) {
  if (std::exchange(choice.started, true)) return {};
  if (request_.dialect == Dialect::chat) {
    static constexpr std::string_view kRole = R"({"role":"assistant","content":""})";
    return event_text(
        fmt::format(R"({{"index":{},"delta":{},"logprobs":null,"finish_reason":null}})", index,
                    kRole),
        nullptr);
  }
  if (!request_.echo) return {};
  return event_text(fmt::format(R"({{"index":{},"text":{},"logprobs":null,"finish_reason":null}})",
                                index, json_text(prompt_of(index).text)),
                    nullptr);
}

// Returns the text or the message's delta that the event adds, as a member of the choice.
std::string CompletionAnswer::delta_for(Choice& choice, const TokenEvent& event,
                                        const std::vector<CallPart>& calls) {
  const std::string text = json_text(event.text);
  if (request_.dialect == Dialect::completions) return R"("text":)" + text;
  if (calls.empty()) return fmt::format(R"("delta":{{"content":{}}})", text);
  json delta = json::object(), list = json::array();
  if (!event.text.empty()) delta["content"] = event.text;
  for (const CallPart& part : calls) {
    json call = {{"index", part.index}};
    call["function"]["arguments"] = part.arguments;
    if (part.name) {
      call["function"]["name"] = *part.name;
      call["id"] = choice.calls[part.index].id;
      call["type"] = "function";
    }
    list.push_back(std::move(call));
  }
  delta["tool_calls"] = std::move(list);
  return R"("delta":)" + json_text(delta);
}

std::string CompletionAnswer::event_for(size_t index, Choice& choice, const TokenEvent& event,
                                        const std::string& delta) {
  std::string logprobs = "null";
  if (request_.logprobs >= 0 && event.token >= 0) {
    const ScoredToken scored{event.token, event.logprob, event.top};
    logprobs = json_text(logprobs_json({&scored, 1}, choice.offset));
  }
  std::string body = fmt::format(R"({{"index":{},{})", index, delta);
  body += fmt::format(R"(,"logprobs":{},"finish_reason":{})", logprobs,
                      json_text(finish_name(event.finish, !choice.calls.empty())));
  if (choice.stop_token) body += fmt::format(R"(,"stop_reason":{})", *choice.stop_token);
  if (request_.token_ids) {
    body +=
        event.token >= 0 ? fmt::format(R"(,"token_ids":[{}])", event.token) : R"(,"token_ids":[])";
  }
  body += '}';
  if (!request_.usage_in_chunks) return event_text(body, nullptr);
  const json usage =
      usage_json(static_cast<int64_t>(prompt_of(index).tokens.size()),
                 static_cast<int64_t>(choice.tokens.size()), event.finish != FinishReason::none);
  return event_text(body, &usage);
}

std::string CompletionAnswer::event_text(const std::string& choice, const json* usage) const {
  std::string text = fmt::format("data: {},\"choices\":[{}]", head_, choice);
  if (usage != nullptr) text += fmt::format(",\"usage\":{}", json_text(*usage));
  return text += "}\n\n";
}

std::string CompletionAnswer::stream_end() const {
  std::string text;
  if (request_.include_usage) {
    const json usage = usage_json(prompt_tokens(), output_tokens(), true);
    text = event_text("", &usage);
  }
  return text += "data: [DONE]\n\n";
}

// Returns each prompt's n choices of the best mean log-probability, the best first; without best_of
// all choices in their order.
std::vector<size_t> CompletionAnswer::shown_choices() const {
  const auto of_prompt = static_cast<size_t>(request_.best_of);
  std::vector<size_t> shown;
  for (size_t first = 0; first < choices_.size(); first += of_prompt) {
    std::vector<size_t> order(of_prompt);
    std::iota(order.begin(), order.end(), first);
    if (request_.best_of > request_.n) {
      const auto mean = [&](size_t index) {
        const Choice& choice = choices_[index];
        return choice.logprob / static_cast<double>(std::max<size_t>(choice.tokens.size(), 1));
      };
      std::ranges::stable_sort(order, std::greater(), mean);
    }
    shown.insert(shown.end(), order.begin(), order.begin() + request_.n);
  }
  return shown;
}

std::string CompletionAnswer::body() const {
  json choices = json::array();
  for (const size_t index : shown_choices())
    choices.push_back(choice_json(index, static_cast<int32_t>(choices.size())));
  return fmt::format("{},\"choices\":{},\"usage\":{}}}", head_, json_text(choices),
                     json_text(usage_json(prompt_tokens(), output_tokens(), true)));
}

json CompletionAnswer::choice_json(size_t index, int32_t shown_index) const {
  const Choice& choice = choices_[index];
  json shown = {{"index", shown_index},
                {"finish_reason", finish_name(choice.finish, !choice.calls.empty())},
                {"logprobs", nullptr},
                {"stop_reason", nullptr}};
  if (choice.stop_token) shown["stop_reason"] = *choice.stop_token;
  if (request_.dialect == Dialect::chat) {
    shown["message"] = message_json(choice);
  } else {
    shown["text"] = request_.echo ? prompt_of(index).text + choice.text : choice.text;
  }
  if (request_.logprobs >= 0) {
    std::vector<ScoredToken> all = choice.scored;
    if (request_.echo)
      all.insert(all.begin(), choice.prompt_scored.begin(), choice.prompt_scored.end());
    int64_t offset = 0;
    shown["logprobs"] = logprobs_json(all, offset);
  }
  if (request_.prompt_logprobs >= 0) {
    LogprobStyle style = style_;
    style.top = request_.prompt_logprobs;
    shown["prompt_logprobs"] = prompt_logprobs(choice.prompt_scored, style);
  }
  if (request_.token_ids) {
    shown["token_ids"] = choice.tokens;
    shown["prompt_token_ids"] = prompt_of(index).tokens;
  }
  return shown;
}

json CompletionAnswer::message_json(const Choice& choice) const {
  json message = {{"role", "assistant"}, {"content", choice.text}, {"refusal", nullptr}};
  if (choice.calls.empty()) return message;
  if (choice.text.empty()) message["content"] = nullptr;
  for (const Call& call : choice.calls) {
    json function = {{"name", call.name}, {"arguments", call.arguments}};
    message["tool_calls"].push_back(
        {{"id", call.id}, {"type", "function"}, {"function", std::move(function)}});
  }
  return message;
}

json CompletionAnswer::logprobs_json(std::span<const ScoredToken> tokens, int64_t& offset) const {
  return request_.dialect == Dialect::chat ? chat_logprobs(tokens, style_)
                                           : completion_logprobs(tokens, style_, offset);
}

json CompletionAnswer::usage_json(int64_t prompt, int64_t output, bool whole) const {
  json usage = {
      {"prompt_tokens", prompt}, {"completion_tokens", output}, {"total_tokens", prompt + output}};
  if (!whole) return usage;
  // The prefix cache helps a prompt once, so only its first choice counts.
  int64_t cached = 0;
  for (size_t i = 0; i < choices_.size(); i += static_cast<size_t>(request_.best_of))
    cached += choices_[i].cached_tokens;
  usage["prompt_tokens_details"]["cached_tokens"] = cached;
  return usage;
}

int64_t CompletionAnswer::prompt_tokens() const {
  size_t sum = 0;
  for (const CompletionPrompt& prompt : request_.prompts) sum += prompt.tokens.size();
  return static_cast<int64_t>(sum);
}

int64_t CompletionAnswer::output_tokens() const {
  size_t sum = 0;
  for (const Choice& choice : choices_) sum += choice.tokens.size();
  return static_cast<int64_t>(sum);
}

}  // namespace fovea::server
