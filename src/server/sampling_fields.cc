// SPDX-License-Identifier: Apache-2.0
#include "server/sampling_fields.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include "fovea/error.h"
#include "server/api_error.h"
#include "server/json_text.h"

namespace fovea::server {
namespace {

using nlohmann::json;

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
constexpr int32_t kMaxLogprobs = 20;
constexpr int32_t kDefaultMaxTokens = 16;  // for completions, as OpenAI has it
constexpr size_t kMaxBiases = 1024, kMaxStopTokens = 1024, kMaxStops = 64, kMaxStopBytes = 1024;

std::vector<TokenBias> read_biases(Fields& body, int32_t vocabulary) {
  std::vector<TokenBias> biases;
  const json* const object = body.find("logit_bias");
  if (object == nullptr) return biases;
  const std::string param = body.path("logit_bias");
  if (!object->is_object()) {
    refuse(param, "{} is {}, must be an object of token ids", param, shown(*object));
  }
  if (object->size() > kMaxBiases) {
    refuse(param, "{} has {} tokens, at most {}", param, object->size(), kMaxBiases);
  }
  Fields entries(*object, param + ".");
  for (const auto& [name, value] : object->items()) {
    int32_t token = -1;
    const char* const end = name.data() + name.size();
    const auto [rest, error] = std::from_chars(name.data(), end, token);
    if (error != std::errc{} || rest != end || token < 0 || token >= vocabulary) {
      refuse(param, "{} has a key of {} bytes that is no token id in [0, {})", param, name.size(),
             vocabulary);
    }
    biases.push_back({token, static_cast<float>(entries.number(name, -100, 100).value_or(0))});
  }
  return biases;
}

std::vector<std::string> read_stops(Fields& body) {
  const json* const value = body.find("stop");
  if (value == nullptr) return {};
  const json list = value->is_array() ? *value : json::array({*value});
  if (list.size() > kMaxStops) {
    refuse("stop", "stop has {} strings, at most {}", list.size(), kMaxStops);
  }
  std::vector<std::string> stops;
  for (const json& entry : list) {
    if (!entry.is_string()) refuse("stop", "stop contains {}, must be strings", shown(entry));
    const auto& text = entry.get_ref<const std::string&>();
    if (text.empty() || text.size() > kMaxStopBytes) {
      refuse("stop", "a string of stop has {} bytes, must have 1 to {}", text.size(),
             kMaxStopBytes);
    }
    stops.push_back(text);
  }
  return stops;
}

void read_distribution(Fields& body, const Engine& engine, SamplingParams& sampling) {
  const auto number = [&](const char* name, double fallback, double low, double high) {
    return static_cast<float>(body.number(name, low, high).value_or(fallback));
  };
  sampling.temperature = number("temperature", 1, 0, 100);
  sampling.top_p = number("top_p", 1, 1e-6, 1);
  sampling.min_p = number("min_p", 0, 0, 1);
  // -1 is vLLM's word for off.
  sampling.top_k =
      static_cast<int32_t>(std::max<int64_t>(0, body.integer("top_k", -1, kMaxInt).value_or(0)));
  sampling.presence_penalty = number("presence_penalty", 0, -2, 2);
  sampling.frequency_penalty = number("frequency_penalty", 0, -2, 2);
  sampling.repetition_penalty = number("repetition_penalty", 1, 0.01, 100);
  sampling.logit_bias = read_biases(body, engine.vocabulary());
}

// Reads max_tokens and, for chats, its newer name.
int64_t read_max_tokens(Fields& body, const Engine& engine, CompletionRequest& request) {
  const bool chat = request.dialect == Dialect::chat;
  const int64_t low = chat || !request.echo ? 1 : 0;
  std::optional<int64_t> given = body.integer("max_tokens", low, kMaxInt);
  if (chat) {
    const std::optional<int64_t> newer = body.integer("max_completion_tokens", 1, kMaxInt);
    if (newer) given = newer;
  }
  request.drops_output = given == 0;
  const int64_t fallback = chat ? engine.max_context() : kDefaultMaxTokens;
  return std::max<int64_t>(1, given.value_or(fallback));
}

constexpr std::string_view kAnyObject = R"({"type":"object"})";

// Returns the JSON schema of response_format, or an empty text for any text. Answers have the
// members in the order of the schema's properties.
std::string schema_of_format(Fields& body, const json& given) {
  if (!given.is_object()) {
    refuse("response_format", "response_format is {}, must be an object", shown(given));
  }
  Fields format(given, "response_format.");
  const std::string type = format.text("type", 64).value_or("");
  if (type == "text") return {};
  if (type == "json_object") return std::string(kAnyObject);
  if (type != "json_schema") {
    refuse("response_format.type", "response_format.type must be text, json_object or json_schema");
  }
  const json* const named = format.find("json_schema");
  const json* const found =
      named != nullptr && named->is_object() ? Fields(*named).find("schema") : nullptr;
  if (found == nullptr) {
    refuse("response_format.json_schema", "response_format.json_schema.schema is missing");
  }
  return json_text(body.ordered("response_format")["json_schema"]["schema"]);
}

// A schema in vLLM's fields may be a text that holds it.
std::string schema_of_value(const nlohmann::ordered_json& value) {
  return value.is_string() ? value.get<std::string>() : json_text(value);
}

// Returns the JSON schema of vLLM's structured_outputs, or an empty text for any text.
std::string schema_of_outputs(Fields& body, const json& given) {
  const std::string param = "structured_outputs";
  if (!given.is_object()) refuse(param, "{} is {}, must be an object", param, shown(given));
  Fields outputs(given, param + ".");
  const bool any_object = outputs.boolean("json_object").value_or(false);
  const json* const schema = outputs.find("json");
  for (const std::string& name : outputs.unknown()) {
    const json& value = given.at(name);
    if (value.is_null() || value == false) continue;
    refuse(param, "{} has constraints that are not supported by this server, besides json", param);
  }
  if (schema != nullptr) return schema_of_value(body.ordered(param)["json"]);
  return any_object ? std::string(kAnyObject) : std::string();
}

// Returns the JSON schema that the answer must fit, or an empty text for any text.
std::string read_schema(Fields& body, const Engine& engine) {
  std::string schema, param;
  const auto take = [&](const char* name, const auto& schema_of) {
    const json* const given = body.find(name);
    if (given == nullptr) return;
    const std::string found = schema_of(*given);
    if (found.empty()) return;
    if (!schema.empty()) refuse(name, "{} and {} exclude each other", param, name);
    schema = found;
    param = name;
  };
  take("response_format", [&](const json& given) { return schema_of_format(body, given); });
  take("structured_outputs", [&](const json& given) { return schema_of_outputs(body, given); });
  take("guided_json", [&](const json&) { return schema_of_value(body.ordered("guided_json")); });
  if (schema.empty()) return schema;
  try {
    engine.check({.tokens = {0}, .sampling = {.json_schema = schema}});
  } catch (const Error& error) {
    refuse(param, "{}", error.what());
  }
  return schema;
}

void read_ends(Fields& body, const Engine& engine, CompletionRequest& request) {
  SamplingParams& sampling = request.sampling;
  const int64_t max_tokens = read_max_tokens(body, engine, request);
  sampling.max_new_tokens = static_cast<int32_t>(max_tokens);
  sampling.min_tokens = static_cast<int32_t>(body.integer("min_tokens", 0, max_tokens).value_or(0));
  sampling.ignore_eos = body.boolean("ignore_eos").value_or(false);
  sampling.json_schema = read_schema(body, engine);
  sampling.stop = read_stops(body);
  if (!sampling.stop.empty() && !engine.has_text()) {
    refuse("stop", "stop needs a tokenizer, which this model's folder does not have");
  }
  if (const json* const tokens = body.find("stop_token_ids")) {
    sampling.stop_tokens = read_tokens(*tokens, "stop_token_ids", engine.vocabulary());
    if (sampling.stop_tokens.size() > kMaxStopTokens) {
      refuse("stop_token_ids", "stop_token_ids has {} ids, at most {}", sampling.stop_tokens.size(),
             kMaxStopTokens);
    }
  }
}

// Chats switch log-probabilities on by a boolean, completions by a number.
int32_t read_logprobs(Fields& body, Dialect dialect) {
  if (dialect == Dialect::completions) {
    return static_cast<int32_t>(body.integer("logprobs", 0, kMaxLogprobs).value_or(-1));
  }
  const bool on = body.boolean("logprobs").value_or(false);
  const std::optional<int64_t> top = body.integer("top_logprobs", 0, kMaxLogprobs);
  if (top.value_or(0) > 0 && !on) {
    refuse("top_logprobs", "top_logprobs is {}, but logprobs is not true", *top);
  }
  return on ? static_cast<int32_t>(top.value_or(0)) : -1;
}

}  // namespace

void read_sampling(Fields& body, const Engine& engine, CompletionRequest& request) {
  SamplingParams& sampling = request.sampling;
  read_distribution(body, engine, sampling);
  read_ends(body, engine, request);
  const std::optional<int64_t> seed = body.integer("seed", std::numeric_limits<int64_t>::min(),
                                                   std::numeric_limits<int64_t>::max());
  request.has_seed = seed.has_value();
  sampling.seed = static_cast<uint64_t>(seed.value_or(0));
  request.logprobs = read_logprobs(body, request.dialect);
  request.prompt_logprobs =
      static_cast<int32_t>(body.integer("prompt_logprobs", -1, kMaxLogprobs).value_or(-1));
  // A score of the prompt costs a pass over it without the prefix cache.
  sampling.prompt_logprobs =
      request.prompt_logprobs >= 0 || (request.echo && request.logprobs >= 0);
  sampling.logprobs = std::max(request.logprobs, request.prompt_logprobs);
  if (request.best_of > request.n) sampling.logprobs = std::max(sampling.logprobs, 0);
  if (sampling.prompt_logprobs && request.stream) {
    refuse(request.echo ? "echo" : "prompt_logprobs",
           "log-probabilities of prompts are not streamed");
  }
}

}  // namespace fovea::server
