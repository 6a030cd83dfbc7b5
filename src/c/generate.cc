// SPDX-License-Identifier: Apache-2.0
// Requests, events and results of the engine.
#include <utility>

#include "c/handles.h"

namespace fovea::c {
namespace {

fovea_sampling_params default_sampling() {
  const SamplingParams from;
  fovea_sampling_params to{.struct_size = sizeof(fovea_sampling_params)};
  to.max_new_tokens = from.max_new_tokens;
  to.temperature = from.temperature;
  to.top_k = from.top_k;
  to.top_p = from.top_p;
  to.min_p = from.min_p;
  to.seed = from.seed;
  to.ignore_eos = from.ignore_eos ? 1 : 0;
  to.logprobs = from.logprobs;
  to.prompt_logprobs = from.prompt_logprobs ? 1 : 0;
  to.repetition_penalty = from.repetition_penalty;
  to.frequency_penalty = from.frequency_penalty;
  to.presence_penalty = from.presence_penalty;
  to.min_tokens = from.min_tokens;
  return to;
}

constexpr fovea_generate_request kDefaultRequest = {.struct_size = sizeof(fovea_generate_request)};
constexpr fovea_generation kDefaultGeneration = {.struct_size = sizeof(fovea_generation)};
constexpr fovea_result kDefaultResult = {.struct_size = sizeof(fovea_result)};

SamplingParams to_sampling(const fovea_sampling_params* params) {
  if (params == nullptr) return {};
  const fovea_sampling_params from = read_struct(params, default_sampling(), "sampling");
  check_reserved(from.reserved, "sampling.reserved");
  SamplingParams to;
  to.max_new_tokens = from.max_new_tokens;
  to.temperature = from.temperature;
  to.top_k = from.top_k;
  to.top_p = from.top_p;
  to.min_p = from.min_p;
  to.seed = from.seed;
  for (const char* const text : entries(from.stop, from.stop_count, "sampling.stop")) {
    to.stop.emplace_back(need_text(text, "an entry of sampling.stop"));
  }
  const auto tokens = entries(from.stop_tokens, from.stop_token_count, "sampling.stop_tokens");
  to.stop_tokens.assign(tokens.begin(), tokens.end());
  to.ignore_eos = to_flag(from.ignore_eos, "sampling.ignore_eos");
  to.logprobs = from.logprobs;
  to.prompt_logprobs = to_flag(from.prompt_logprobs, "sampling.prompt_logprobs");
  to.json_schema = text_or_empty(from.json_schema);
  for (const fovea_token_bias& bias :
       entries(from.logit_bias, from.logit_bias_count, "sampling.logit_bias")) {
    to.logit_bias.push_back({bias.token, bias.bias});
  }
  to.repetition_penalty = from.repetition_penalty;
  to.frequency_penalty = from.frequency_penalty;
  to.presence_penalty = from.presence_penalty;
  to.min_tokens = from.min_tokens;
  return to;
}

GenerateRequest to_request(const fovea_generate_request* request) {
  const fovea_generate_request from = read_struct(request, kDefaultRequest, "request");
  check_reserved(from.reserved, "request.reserved");
  GenerateRequest to;
  to.prompt = text_or_empty(from.prompt);
  const auto tokens = entries(from.tokens, from.token_count, "request.tokens");
  to.tokens.assign(tokens.begin(), tokens.end());
  check(from.prompt != nullptr || !tokens.empty(), "request.prompt and request.tokens are null");
  to.sampling = to_sampling(from.sampling);
  to.salt = text_or_empty(from.salt);
  return to;
}

std::vector<fovea_token_logprob> to_top(const std::vector<TokenLogprob>& from) {
  std::vector<fovea_token_logprob> to;
  to.reserve(from.size());
  for (const TokenLogprob& entry : from) to.push_back({entry.token, entry.logprob});
  return to;
}

// Calls back with an event. Returns true if the caller cancels the request.
bool call_back(const TokenEvent& event, fovea_event_fn on_event, void* user) {
  const std::vector<fovea_token_logprob> top = to_top(event.top);
  fovea_token_event given{.struct_size = sizeof(fovea_token_event)};
  given.token = event.token;
  given.request = event.request;
  given.text = event.text.c_str();
  given.text_bytes = event.text.size();
  given.logprob = event.logprob;
  given.finish = static_cast<int32_t>(event.finish);
  given.top = top.data();
  given.top_count = top.size();
  given.error = event.error.c_str();
  given.prompt_tokens = event.prompt_tokens;
  given.cached_tokens = event.cached_tokens;
  given.prompt_logprobs = event.prompt_logprobs.data();
  given.prompt_logprob_count = event.prompt_logprobs.size();
  return on_event(user, &given) != 0;
}

// Marks the engine as running, so that callbacks cannot run a second pass.
class Running {
 public:
  explicit Running(fovea_engine& engine) : engine_(engine) {
    check(!engine.running, "engine is calling back, this call must wait for the end of the step");
    engine.running = true;
  }
  ~Running() { engine_.running = false; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  fovea_engine& engine_;
};

void step(fovea_engine& engine, fovea_event_fn on_event, void* user) {
  const Running running(engine);
  for (const TokenEvent& event : engine.object->step()) {
    if (on_event != nullptr && call_back(event, on_event, user)) {
      engine.object->cancel(event.request);
    }
  }
}

std::vector<GenerateResult> generate(fovea_engine& engine, const fovea_generation* given) {
  const Running running(engine);
  const fovea_generation generation = read_struct(given, kDefaultGeneration, "generation");
  check_reserved(generation.reserved, "generation.reserved");
  std::vector<GenerateRequest> requests;
  for (const auto* request : entries(generation.requests, generation.count, "requests")) {
    requests.push_back(to_request(request));
  }
  const auto on_token = [&](const TokenEvent& event) {
    if (call_back(event, generation.on_event, generation.user))
      engine.object->cancel(event.request);
  };
  if (generation.on_event == nullptr) return engine.object->generate(requests);
  return engine.object->generate(requests, on_token);
}

const GenerateResult& result_at(const fovea_results* results, size_t index) {
  const auto& all = need(results, "results").object;
  check(index < all.size(), "index is {}, there are {} results", index, all.size());
  return all[index];
}

fovea_result from_result(const GenerateResult& from) {
  fovea_result to = kDefaultResult;
  to.finish = static_cast<int32_t>(from.finish);
  to.request = from.request;
  to.tokens = from.tokens.data();
  to.token_count = from.tokens.size();
  to.text = from.text.c_str();
  to.text_bytes = from.text.size();
  to.error = from.error.c_str();
  to.logprobs = from.logprobs.data();
  to.logprob_count = from.logprobs.size();
  to.prompt_logprobs = from.prompt_logprobs.data();
  to.prompt_logprob_count = from.prompt_logprobs.size();
  to.prompt_tokens = from.prompt_tokens;
  to.cached_tokens = from.cached_tokens;
  return to;
}

}  // namespace
}  // namespace fovea::c

using namespace fovea::c;  // NOLINT: the functions below are those of the C header

fovea_status fovea_sampling_params_init(fovea_sampling_params* params, size_t struct_size) {
  return init_struct(params, struct_size, default_sampling(), "params");
}

fovea_status fovea_generate_request_init(fovea_generate_request* request, size_t struct_size) {
  return init_struct(request, struct_size, kDefaultRequest, "request");
}

fovea_status fovea_generation_init(fovea_generation* generation, size_t struct_size) {
  return init_struct(generation, struct_size, kDefaultGeneration, "generation");
}

fovea_status fovea_engine_add(fovea_engine* engine, const fovea_generate_request* request,
                              int64_t* id) {
  return guarded([&] {
    fovea_engine& given = need(engine, "engine");
    set(id, 0, "id");
    *id = given.object->add(to_request(request));
  });
}

fovea_status fovea_engine_cancel(fovea_engine* engine, int64_t id) {
  return guarded([&] { need(engine, "engine").object->cancel(id); });
}

fovea_status fovea_engine_idle(const fovea_engine* engine, int32_t* idle) {
  return guarded([&] { set(idle, need(engine, "engine").object->idle() ? 1 : 0, "idle"); });
}

fovea_status fovea_engine_step(fovea_engine* engine, fovea_event_fn on_event, void* user) {
  return guarded([&] { step(need(engine, "engine"), on_event, user); });
}

fovea_status fovea_engine_generate(fovea_engine* engine, const fovea_generation* generation,
                                   fovea_results** results) {
  return guarded([&] {
    clear_handle(results, "results");
    fovea_engine& given = need(engine, "engine");
    auto made = std::make_unique<fovea_results>();
    made->object = generate(given, generation);
    give_handle(std::move(made), results);
  });
}

fovea_status fovea_results_destroy(fovea_results* results) {
  return destroy_handle(results, "results");
}

fovea_status fovea_results_count(const fovea_results* results, size_t* count) {
  return guarded([&] { set(count, need(results, "results").object.size(), "count"); });
}

fovea_status fovea_result_init(fovea_result* result, size_t struct_size) {
  return init_struct(result, struct_size, kDefaultResult, "result");
}

fovea_status fovea_results_get(const fovea_results* results, size_t index, fovea_result* result) {
  return guarded([&] { write_struct(result, from_result(result_at(results, index)), "result"); });
}

fovea_status fovea_results_top(const fovea_results* results, size_t index, size_t token,
                               fovea_token_logprob* top, size_t* count) {
  return guarded([&] {
    const fovea::GenerateResult& given = result_at(results, index);
    check(token < given.tokens.size(), "token is {}, the result has {}", token,
          given.tokens.size());
    const auto likely =
        token < given.top.size() ? to_top(given.top[token]) : std::vector<fovea_token_logprob>();
    give_array<fovea_token_logprob>(likely, top, count, "top");
  });
}
