// SPDX-License-Identifier: Apache-2.0
#include "server/completion_request.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <span>
#include <string_view>

#include "fovea/error.h"
#include "server/api_error.h"
#include "server/chat_messages.h"
#include "server/sampling_fields.h"

namespace fovea::server {
namespace {

using nlohmann::json;

constexpr int32_t kMaxChoices = 128;  // max choices of all prompts of a request
constexpr size_t kMaxNameBytes = 1024;
constexpr int32_t kMaxPriority = 3600;

// A field that would change the answer and is not supported, and the values that change nothing.
struct RefusedField {
  std::string_view name;
  std::string_view neutral;  // a JSON array
};
constexpr RefusedField kRefused[] = {
    {"suffix", R"([""])"},
    {"functions", "[[]]"},
    {"function_call", R"(["none", "auto"])"},
    {"guided_regex", "[]"},
    {"guided_choice", "[]"},
    {"guided_grammar", "[]"},
    {"regex", "[]"},
    {"ebnf", "[]"},
    {"grammar", R"([""])"},
    {"json_schema", "[]"},
    {"bad_words", "[[]]"},
    {"allowed_token_ids", "[]"},
    {"logprob_token_ids", "[]"},
    {"use_beam_search", "[false]"},
    {"length_penalty", "[1, 1.0]"},
    {"prompt_embeds", "[]"},
    {"kv_transfer_params", "[]"},
    {"include_stop_str_in_output", "[false]"},
    {"chat_template", "[]"},
    {"mm_processor_kwargs", "[{}]"},
    {"modalities", R"([["text"]])"},
    {"audio", "[]"},
    {"web_search_options", "[]"},
};

// Fields of chats, which are refused in completions.
constexpr RefusedField kChatOnly[] = {
    {"tools", "[[]]"},
    {"tool_choice", R"(["none", "auto"])"},
    {"parallel_tool_calls", "[true, false]"},
    {"chat_template_kwargs", "[{}]"},
    {"documents", "[[]]"},
    {"continue_final_message", "[false]"},
    {"add_generation_prompt", "[true]"},
};

// Fields of OpenAI's API that describe a request and change no answer.
constexpr std::array<std::string_view, 9> kWithoutEffect = {"user",
                                                            "store",
                                                            "prediction",
                                                            "metadata",
                                                            "service_tier",
                                                            "request_id",
                                                            "safety_identifier",
                                                            "prompt_cache_key",
                                                            "spaces_between_special_tokens"};

void refuse_fields(Fields& body, std::span<const RefusedField> fields, const char* where) {
  for (const RefusedField& field : fields) {
    const json* const value = body.find(field.name);
    if (value == nullptr) continue;
    const json neutral = json::parse(field.neutral);
    if (std::ranges::find(neutral, *value) == neutral.end()) {
      refuse(field.name, "{} is not supported {}", field.name, where);
    }
  }
}

void refuse_unsupported(Fields& body, Dialect dialect) {
  refuse_fields(body, kRefused, "by this server");
  if (dialect == Dialect::completions) refuse_fields(body, kChatOnly, "in completions");
  for (const std::string_view name : kWithoutEffect) (void)body.find(name);
}

CompletionPrompt prompt_of(const json& value, const std::string& param, const Engine& engine,
                           bool add_special) {
  CompletionPrompt prompt;
  if (value.is_string()) {
    prompt.text = value.get<std::string>();
    prompt.tokens = add_special ? engine.encode(prompt.text) : engine.encode_bare(prompt.text);
  } else {
    prompt.tokens = read_tokens(value, param, engine.vocabulary());
  }
  if (prompt.tokens.empty()) refuse(param, "{} has 0 tokens, must have at least 1", param);
  return prompt;
}

// A prompt is a text, token ids, or a list of either.
std::vector<CompletionPrompt> read_prompts(Fields& body, const Engine& engine) {
  const json* const given = body.find("prompt");
  const bool add_special = body.boolean("add_special_tokens").value_or(true);
  if (given == nullptr) refuse("prompt", "prompt is missing");
  const bool is_list = given->is_array() && !given->empty() && !given->front().is_number();
  if (!is_list) return {prompt_of(*given, "prompt", engine, add_special)};
  if (given->size() > static_cast<size_t>(kMaxChoices)) {
    refuse("prompt", "prompt has {} prompts, at most {}", given->size(), kMaxChoices);
  }
  std::vector<CompletionPrompt> prompts;
  for (size_t i = 0; i < given->size(); ++i) {
    prompts.push_back(prompt_of((*given)[i], fmt::format("prompt[{}]", i), engine, add_special));
  }
  return prompts;
}

void read_choices(Fields& body, CompletionRequest& request) {
  request.n = static_cast<int32_t>(body.integer("n", 1, kMaxChoices).value_or(1));
  request.best_of = request.n;
  if (request.dialect == Dialect::completions) {
    request.best_of =
        static_cast<int32_t>(body.integer("best_of", request.n, kMaxChoices).value_or(request.n));
  }
  if (request.best_of > request.n && request.stream) {
    refuse("best_of",
           "best_of is {} with n {}: the best choices are known at the end, so they "
           "cannot be streamed",
           request.best_of, request.n);
  }
}

void read_stream(Fields& body, CompletionRequest& request) {
  request.stream = body.boolean("stream").value_or(false);
  const json* const options = body.find("stream_options");
  if (options == nullptr) return;
  if (!options->is_object()) {
    refuse("stream_options", "stream_options is {}, must be an object", shown(*options));
  }
  Fields fields(*options, "stream_options.");
  request.include_usage = fields.boolean("include_usage").value_or(false);
  request.usage_in_chunks = fields.boolean("continuous_usage_stats").value_or(false);
  if (!request.stream && (request.include_usage || request.usage_in_chunks)) {
    refuse("stream_options", "stream_options needs stream to be true");
  }
}

// Reads the tools, and lets the answer follow their schema if it must be calls.
void read_answer_tools(Fields& body, const Engine& engine, CompletionRequest& request) {
  request.tools = read_tools(body, engine);
  if (request.tools.use == ToolUse::none) return;
  if (!request.sampling.json_schema.empty()) {
    refuse("response_format",
           "response_format leaves no room for calls of tools, unless tool_choice is none");
  }
  request.sampling.json_schema = request.tools.schema;
}

// Keeps the last tokens of prompts that are longer than truncate_prompt_tokens; -1: than the
// context, less a place for the answer.
void truncate_prompts(Fields& body, const Engine& engine, std::vector<CompletionPrompt>& prompts) {
  const int64_t longest = engine.max_context() - 1;
  const auto given = body.integer("truncate_prompt_tokens", -1, longest);
  if (!given) return;
  if (*given == 0) {
    refuse("truncate_prompt_tokens", "truncate_prompt_tokens is 0, must be -1 or in [1, {}]",
           longest);
  }
  const auto limit = static_cast<size_t>(*given < 0 ? longest : *given);
  for (CompletionPrompt& prompt : prompts) {
    if (prompt.tokens.size() <= limit) continue;
    prompt.tokens.erase(prompt.tokens.begin(), prompt.tokens.end() - static_cast<int64_t>(limit));
    prompt.text = {};
  }
}

void read_all_prompts(Fields& body, const Engine& engine, CompletionRequest& request) {
  const bool chat = request.dialect == Dialect::chat;
  const std::string param = chat ? "messages" : "prompt";
  try {
    if (chat) {
      request.prompts.push_back({read_conversation(body, engine, request.tools.tools), {}});
    } else {
      request.prompts = read_prompts(body, engine);
    }
    const auto choices = request.prompts.size() * static_cast<size_t>(request.best_of);
    if (choices > static_cast<size_t>(kMaxChoices)) {
      refuse(request.best_of > 1 ? "n" : param,
             "{} prompts with {} choices each, at most {} in all", request.prompts.size(),
             request.best_of, kMaxChoices);
    }
    truncate_prompts(body, engine, request.prompts);
    for (CompletionPrompt& prompt : request.prompts) {
      if (request.echo && prompt.text.empty()) prompt.text = engine.decode(prompt.tokens);
      engine.check({.tokens = prompt.tokens, .sampling = request.sampling});
    }
  } catch (const Error& error) {
    refuse(param, "{}", error.what());
  }
}

}  // namespace

std::vector<ServiceRequest> CompletionRequest::requests(uint64_t seed) const {
  std::vector<ServiceRequest> all;
  uint64_t next_seed = has_seed ? sampling.seed : seed;
  for (const CompletionPrompt& prompt : prompts) {
    for (int32_t i = 0; i < best_of; ++i) {
      ServiceRequest& one = all.emplace_back();
      one.request.tokens = prompt.tokens;
      one.request.sampling = sampling;
      one.request.sampling.seed = next_seed + static_cast<uint64_t>(i);
      one.request.salt = salt;
      one.priority = priority;
    }
    if (!has_seed) next_seed += static_cast<uint64_t>(best_of);
  }
  return all;
}

CompletionRequest read_completion(Dialect dialect, std::string_view text, const Engine& engine) {
  const auto document = parse_body(text);
  Fields body = Fields::of_body(*document, text);
  CompletionRequest request;
  request.dialect = dialect;
  request.model = body.text("model", kMaxNameBytes).value_or("");
  refuse_unsupported(body, dialect);
  read_stream(body, request);
  read_choices(body, request);
  if (dialect == Dialect::completions) request.echo = body.boolean("echo").value_or(false);
  read_sampling(body, engine, request);
  if (dialect == Dialect::chat) read_answer_tools(body, engine, request);
  request.special_tokens = !body.boolean("skip_special_tokens").value_or(true);
  if (request.special_tokens && !request.sampling.stop.empty()) {
    refuse("skip_special_tokens", "skip_special_tokens is false, which excludes stop");
  }
  request.token_ids = body.boolean("return_token_ids").value_or(false);
  request.tokens_as_ids = body.boolean("return_tokens_as_token_ids").value_or(false);
  request.salt = body.text("cache_salt", kMaxNameBytes).value_or("");
  request.priority =
      static_cast<int32_t>(body.integer("priority", -kMaxPriority, kMaxPriority).value_or(0));
  read_all_prompts(body, engine, request);
  request.ignored = body.unknown();
  return request;
}

}  // namespace fovea::server
