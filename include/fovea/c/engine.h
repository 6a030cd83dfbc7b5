// SPDX-License-Identifier: Apache-2.0
// Generates text from a checkpoint. fovea/engine.h describes every option. Include fovea/fovea.h.
#ifndef FOVEA_C_ENGINE_H_
#define FOVEA_C_ENGINE_H_

#include "fovea/c/select.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fovea_engine_options {
  uint32_t struct_size;
  int32_t has_random_weights;  // 1: weights are generated from random_weights instead of read
  uint64_t random_weights;
  // Folder with config.json, *.safetensors, and tokenizer.json or tokenizer.model.
  const char* model_path;
  const char* device;          // "cpu" (NULL), "cuda", "cuda:N"
  const char* backend;         // "auto" (NULL), "NAME", "prefer:NAME"
  const char* decode_backend;  // as backend; NULL: the same as backend
  fovea_dtype kv_dtype;        // default fp32; a GPU needs bf16 or fp8
  int32_t kv_scale;
  int32_t page_size;         // default 16
  int32_t max_requests;      // default 32
  uint64_t kv_memory_bytes;  // 0: half of the device's free memory
  int32_t max_batch_tokens;  // default 512
  int32_t max_context;       // 0: the model's limit
  int32_t threads;           // 0: one per core
  int32_t prefix_cache;      // default 1
  int32_t batch_invariant;
  int32_t cuda_graphs;         // default 1
  int32_t max_graph_requests;  // default 256
  int32_t prefix_levels;       // default 2
  int64_t min_prefix_savings;  // bytes; default -1: chosen for the device
  int64_t workspace_budget;
  int32_t overlap;  // enqueue the next step while one runs; default -1: off, see EngineOptions
  int32_t max_mixed_tokens;  // new tokens of a step with decodes and prompts; 0: max_batch_tokens
  const char* speculate;     // "ngram", "draft:FOLDER", "eagle:FOLDER"; NULL: off
  int32_t max_drafts;        // guessed tokens per request and step; default 4
  int32_t always_speculate;  // 1: also where steps without guesses are faster
  int32_t draft_branches;    // guesses after each token, with draft: or eagle:; default 1
  int32_t reserved;          // 0
} fovea_engine_options;
FOVEA_C_API fovea_status fovea_engine_options_init(fovea_engine_options* options,
                                                   size_t struct_size);

typedef struct fovea_engine fovea_engine;
// Loads a checkpoint.
FOVEA_C_API fovea_status fovea_engine_load(const fovea_engine_options* options,
                                           fovea_engine** engine);
FOVEA_C_API fovea_status fovea_engine_destroy(fovea_engine* engine);
// Describes what fovea_engine_load() would choose and allocate, without reading weights. `device`,
// if given, replaces options->device and need not exist here; kv_memory_bytes must then be given.
FOVEA_C_API fovea_status fovea_engine_plan(const fovea_engine_options* options,
                                           const fovea_device_info* device, char* text,
                                           size_t* bytes);

typedef struct fovea_token_bias {
  int32_t token;
  float bias;
} fovea_token_bias;

typedef struct fovea_sampling_params {
  uint32_t struct_size;
  int32_t max_new_tokens;  // default 64
  float temperature;       // 0: greedy
  int32_t top_k;           // 0: off
  float top_p;             // default 1
  float min_p;
  uint64_t seed;
  const char* const* stop;  // [stop_count] texts that end generation and are not part of the output
  size_t stop_count;
  const int32_t* stop_tokens;  // [stop_token_count]
  size_t stop_token_count;
  int32_t ignore_eos;
  int32_t logprobs;  // default -1: off; 0 to 20: log-probabilities of this many likely tokens, too
  int32_t prompt_logprobs;
  int32_t reserved;         // 0
  const char* json_schema;  // the text is a JSON value that this JSON schema allows; NULL: any text
  const fovea_token_bias* logit_bias;  // [logit_bias_count] added to logits
  size_t logit_bias_count;
  float repetition_penalty;  // default 1: off
  float frequency_penalty;
  float presence_penalty;
  int32_t min_tokens;  // before them no end or stop token is drawn
} fovea_sampling_params;
FOVEA_C_API fovea_status fovea_sampling_params_init(fovea_sampling_params* params,
                                                    size_t struct_size);

typedef struct fovea_generate_request {
  uint32_t struct_size;
  int32_t reserved;                       // 0
  const char* prompt;                     // used if token_count is 0
  const int32_t* tokens;                  // [token_count]
  size_t token_count;                     // 0: the prompt is text
  const fovea_sampling_params* sampling;  // NULL: the defaults
  const char* salt;  // requests with different salts never share cached prefixes; NULL: none
} fovea_generate_request;
FOVEA_C_API fovea_status fovea_generate_request_init(fovea_generate_request* request,
                                                     size_t struct_size);

enum {
  FOVEA_FINISH_NONE = 0,
  FOVEA_FINISH_STOP = 1,       // an end-of-sequence token, a stop token or a stop string
  FOVEA_FINISH_LENGTH = 2,     // max_new_tokens or the context
  FOVEA_FINISH_CANCELLED = 3,  // by cancellation
  FOVEA_FINISH_FAILED = 4      // for a reason that concerns this request alone: `error`
};

typedef struct fovea_token_logprob {
  int32_t token;
  float logprob;
} fovea_token_logprob;

// One token of a request, or its end. All pointers are valid during the callback.
typedef struct fovea_token_event {
  uint32_t struct_size;
  int32_t token;  // -1: only the end of the request
  int64_t request;
  const char* text;  // text that this token made final; it may contain zero bytes
  size_t text_bytes;
  float logprob;
  int32_t finish;
  const fovea_token_logprob* top;  // [top_count], best first
  size_t top_count;
  const char* error;  // with FOVEA_FINISH_FAILED, else ""
  // Set in the event that ends the request.
  int32_t prompt_tokens;
  int32_t cached_tokens;
  const float* prompt_logprobs;  // [prompt_logprob_count]
  size_t prompt_logprob_count;
} fovea_token_event;
// Called for every event. A result other than 0 cancels the request. It may call
// fovea_engine_add() and fovea_engine_cancel(), but not step or generate.
typedef int32_t (*fovea_event_fn)(void* user, const fovea_token_event* event);

// Queues a request and gives its id.
FOVEA_C_API fovea_status fovea_engine_add(fovea_engine* engine,
                                          const fovea_generate_request* request, int64_t* id);
// Ends a request. Unknown and finished ids are ignored.
FOVEA_C_API fovea_status fovea_engine_cancel(fovea_engine* engine, int64_t id);
// Sets *idle to 1 if no request is queued or running.
FOVEA_C_API fovea_status fovea_engine_idle(const fovea_engine* engine, int32_t* idle);
// Runs one forward pass over the requests that fit and calls on_event for every token that it
// produced.
FOVEA_C_API fovea_status fovea_engine_step(fovea_engine* engine, fovea_event_fn on_event,
                                           void* user);

typedef struct fovea_results fovea_results;
typedef struct fovea_generation {
  uint32_t struct_size;
  int32_t reserved;                               // 0
  const fovea_generate_request* const* requests;  // [count]
  size_t count;
  fovea_event_fn on_event;  // NULL: none
  void* user;
} fovea_generation;
FOVEA_C_API fovea_status fovea_generation_init(fovea_generation* generation, size_t struct_size);
// Adds all requests, runs steps until they have finished, and gives their results in order.
FOVEA_C_API fovea_status fovea_engine_generate(fovea_engine* engine,
                                               const fovea_generation* generation,
                                               fovea_results** results);
FOVEA_C_API fovea_status fovea_results_destroy(fovea_results* results);
FOVEA_C_API fovea_status fovea_results_count(const fovea_results* results, size_t* count);

// All pointers are valid as long as the results.
typedef struct fovea_result {
  uint32_t struct_size;
  int32_t finish;
  int64_t request;
  const int32_t* tokens;  // [token_count] generated
  size_t token_count;
  const char* text;  // it may contain zero bytes
  size_t text_bytes;
  const char* error;      // with FOVEA_FINISH_FAILED, else ""
  const float* logprobs;  // [logprob_count]: one per token, or none
  size_t logprob_count;
  const float* prompt_logprobs;
  size_t prompt_logprob_count;
  int32_t prompt_tokens;
  int32_t cached_tokens;
} fovea_result;
FOVEA_C_API fovea_status fovea_result_init(fovea_result* result, size_t struct_size);
FOVEA_C_API fovea_status fovea_results_get(const fovea_results* results, size_t index,
                                           fovea_result* result);
// Gives the likely tokens at a generated token, with fovea_sampling_params::logprobs > 0.
FOVEA_C_API fovea_status fovea_results_top(const fovea_results* results, size_t index, size_t token,
                                           fovea_token_logprob* top, size_t* count);

FOVEA_C_API fovea_status fovea_engine_encode(const fovea_engine* engine, const char* text,
                                             int32_t* tokens, size_t* count);
// Encodes a message in the chat format of the checkpoint. `system` is NULL for the format's own.
FOVEA_C_API fovea_status fovea_engine_encode_chat(const fovea_engine* engine, const char* user,
                                                  const char* system, int32_t* tokens,
                                                  size_t* count);
// A conversation for the chat template of the checkpoint, in the JSON of OpenAI's chat completions.
typedef struct fovea_conversation {
  uint32_t struct_size;
  int32_t add_generation_prompt;  // default 1: ends with the beginning of an answer
  const char* messages;           // a JSON array
  const char* tools;              // a JSON array of functions; NULL: none
  const char* variables;          // a JSON object, further variables of the template; NULL: none
  int32_t continue_last_message;  // 1: ends within the last message; then no generation prompt
  int32_t reserved;               // 0
} fovea_conversation;
FOVEA_C_API fovea_status fovea_conversation_init(fovea_conversation* conversation,
                                                 size_t struct_size);
// Encodes a whole conversation.
FOVEA_C_API fovea_status fovea_engine_encode_conversation(const fovea_engine* engine,
                                                          const fovea_conversation* conversation,
                                                          int32_t* tokens, size_t* count);
FOVEA_C_API fovea_status fovea_engine_decode(const fovea_engine* engine, const int32_t* tokens,
                                             size_t count, char* text, size_t* bytes);
// Gives the logits [count, vocabulary] of every token of one sequence. *size counts floats.
FOVEA_C_API fovea_status fovea_engine_logits(fovea_engine* engine, const int32_t* tokens,
                                             size_t count, float* logits, size_t* size);
// Drops every cached prefix that no running request uses.
FOVEA_C_API fovea_status fovea_engine_clear_prefix_cache(fovea_engine* engine);

typedef struct fovea_engine_stats {
  uint32_t struct_size;
  int32_t vocabulary;
  int32_t max_context;
  int32_t wanted_context;  // larger than max_context if the KV budget holds less
  int32_t has_text;        // 1: the checkpoint's tokenizer was read
  int32_t graphs;          // captured steps
  int64_t steps;
  int64_t prefill_tokens, decode_tokens;
  double prefill_seconds, decode_seconds;
  int64_t shared_steps;
  int64_t prefix_queries, prefix_hits;  // tokens
  int64_t preemptions;
  int64_t kv_pages, kv_pages_free;
  uint64_t memory_bytes;            // on the device
  int64_t draft_steps;              // steps that verified guessed tokens
  int64_t draft_requests;           // requests with such tokens, summed over these steps
  int64_t drafts, accepted_drafts;  // guessed tokens; those that became text
  double speculation_gain;  // tokens/s of steps with drafts over those without; 0: not measured
} fovea_engine_stats;
FOVEA_C_API fovea_status fovea_engine_stats_init(fovea_engine_stats* stats, size_t struct_size);
FOVEA_C_API fovea_status fovea_engine_get_stats(const fovea_engine* engine,
                                                fovea_engine_stats* stats);
// Describes the chosen backends and the memory.
FOVEA_C_API fovea_status fovea_engine_explain(const fovea_engine* engine, char* text,
                                              size_t* bytes);
// Gives choices of the load that a caller may not expect, one sentence a line.
FOVEA_C_API fovea_status fovea_engine_notes(const fovea_engine* engine, char* text, size_t* bytes);
// Gives the selection of a layer group; with `decode` 1 that of its decode steps. Groups count from
// 0; FOVEA_INVALID_ARGUMENT names their number.
FOVEA_C_API fovea_status fovea_engine_selection(const fovea_engine* engine, size_t group,
                                                int32_t decode, fovea_selection** selection);

#ifdef __cplusplus
}
#endif

#endif  // FOVEA_C_ENGINE_H_
