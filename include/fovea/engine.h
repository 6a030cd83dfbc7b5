// SPDX-License-Identifier: Apache-2.0
// Generates text from a checkpoint: requests in, tokens out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/api.h"
#include "fovea/engine_stats.h"
#include "fovea/kv_cache.h"
#include "fovea/select_backend.h"
#include "fovea/tool_calls.h"

namespace FOVEA_API fovea {

struct EngineOptions {
  // Folder with config.json, *.safetensors, and tokenizer.json or tokenizer.model.
  std::string model_path = {};
  // If set, weights are generated from this seed instead of read, in the config's dtype (default
  // bf16); equal seeds give equal bits. model_path may then be a config.json, or a folder with
  // nothing else. A quantization_config is ignored, because it describes files.
  std::optional<uint64_t> random_weights = {};
  std::string device = "cpu";  // or "cuda", "cuda:N"; holds weights, caches and activations
  // Backends the engine may choose from; null: BackendRegistry::builtin(). Must outlive the engine.
  const BackendRegistry* registry = nullptr;
  BackendWish backend = {};                        // for layer groups with softmax attention
  std::optional<BackendWish> decode_backend = {};  // unset: same as backend
  DType kv_dtype = DType::f32;                     // a GPU needs bf16 or fp8
  // Scales of an fp8 cache. none: per_token_head, and KvLayout::mla_fp8_rows for e4m3 latents of
  // 512 + 64 values. Scales of kind per_tensor and per_head stay 1.
  KvScale kv_scale = KvScale::none;
  int32_t page_size = 16;
  // Upper limit for all pools together; 0: half of the device's free memory.
  size_t kv_memory_bytes = 0;
  int32_t max_requests = 32;       // running at once
  int32_t max_batch_tokens = 512;  // new tokens of one step; longer prompts are chunked
  // New tokens of a step that has both decodes and prompts, drafts not counted. A smaller number
  // bounds the time between tokens while prompts are computed, and prompts take longer. They get
  // what the decodes leave of it, at least 16 tokens. At most max_batch_tokens; 0: as many.
  int32_t max_mixed_tokens = 0;
  // Tokens of one request, at most the model's limit and 2^22. 0: the model's limit, or less if
  // kv_memory_bytes holds less, or if longer contexts would change the results of short ones
  // (longrope: the original length).
  int32_t max_context = 0;
  int threads = 0;  // 0: one per core
  bool prefix_cache = true;
  // The bits of a request do not depend on other requests, on how its prompt was chunked or on
  // cached prefixes. On a GPU they can depend on max_batch_tokens.
  bool batch_invariant = false;
  // On a GPU: replay captured steps of up to max_graph_requests requests instead of enqueueing
  // their kernels, if all backends allow it (GroupSelection::why_no_graphs). load() captures decode
  // steps of 1, 2, 4 and all multiples of 8 requests, those of up to 8 requests also for short
  // contexts, and steps of up to 128 tokens with chunks of prompts. EngineStats reports their
  // number and memory.
  bool cuda_graphs = true;
  int32_t max_graph_requests = 256;
  // step() enqueues the next pass before it waits for its own, so that the device does not wait for
  // the host. Tokens go from pass to pass on the device. The text is the same; a request that ends
  // by a token or a stop string has computed one more token, which nobody sees. Passes still follow
  // one another where the host needs the logits (log-probabilities, penalties) and for models with
  // recurrent states. On the CPU it saves no time, because a pass has run when it is enqueued.
  // Unset: off.
  std::optional<bool> overlap = {};
  // Guesses tokens of each request and verifies them in one pass, so that a step can yield several
  // tokens. "ngram": tokens that followed an earlier occurrence of the text's last ones.
  // "draft:FOLDER": tokens of a smaller model with the same vocabulary, whose caches are a part of
  // kv_memory_bytes. "eagle:FOLDER": tokens of an EAGLE-3 head (arXiv:2503.01840), or of the MTP
  // layer of DeepSeek-V3 (arXiv:2412.19437) or Qwen3-Next, that was trained for the model and reads
  // hidden states of its layers; its caches, and what it keeps of the hidden states of each cached
  // token, are a part of kv_memory_bytes, as is a recurrent state for each guess. Empty: off. Text
  // is that without speculation, sampled text too, because a guess counts only if it is the token
  // that the request draws; bits of logits are equal in batch-invariant mode. Refused with overlap.
  // "oracle:LENGTH", with random_weights only, measures speed: random guesses are accepted,
  // whatever the model says, so that a step of max_drafts guesses yields LENGTH tokens on average.
  std::string speculate = {};
  int32_t max_drafts = 4;  // guesses per request and step, in [1, 63]
  // With draft: or eagle: guesses up to so many tokens after each token, in [1, 8]. The guesses of
  // a request are then a tree of the max_drafts likeliest ones, of which a step accepts one path.
  // Not for models with recurrent states or contexts that are divided among ranks.
  int32_t draft_branches = 1;
  // Verifies max_drafts guesses in every step. By default steps without guesses, and with fewer,
  // are tried now and then, and those that were measured to be the fastest are used.
  bool always_speculate = false;
  bool record_steps = false;  // for Engine::take_step_records()
  // Attention reads a cached prefix once for all requests that share it, in up to prefix_levels
  // levels (a system prompt, then a document; at most 4, 0: never). A level must save
  // min_prefix_savings bytes of one layer's keys and values; unset: 1 MB, on a GPU 512 MB
  // (docs/kernels/cascade.md). The last bits of results can then depend on which requests share.
  int32_t prefix_levels = 2;
  std::optional<int64_t> min_prefix_savings = {};
  // Bytes of workspace that the attention of a layer group tries to keep to; see BatchLimits.
  int64_t workspace_budget = BatchLimits{}.workspace_budget;
};

struct TokenBias {
  int32_t token = 0;
  float bias = 0;
};

// Logits are changed first: by logit_bias, the penalties in the order of their fields, min_tokens
// and json_schema. On a GPU, requests that change logits draw their tokens on the host.
// Temperature, min_p, top_k and top_p follow in this order, each applied to the tokens that the
// previous one kept. A draw depends on the seed, the token's position and the request's own logits
// only.
struct SamplingParams {
  int32_t max_new_tokens = 64;  // at least 1; the context may end a request earlier
  float temperature = 0;        // in [0, 100]; 0: greedy
  int32_t top_k = 0;            // 0: off
  float top_p = 1;              // in (0, 1]
  float min_p = 0;              // in [0, 1], relative to the most likely token
  uint64_t seed = 0;
  std::vector<TokenBias> logit_bias = {};  // up to 1024; values in [-100, 100], added to logits
  // In [0.01, 100]; 1: off. Positive logits of tokens in the prompt or the output are divided by
  // it, negative ones multiplied.
  float repetition_penalty = 1;
  float frequency_penalty = 0;  // in [-2, 2]; times a token's number in the output
  float presence_penalty = 0;   // in [-2, 2]; for every token in the output
  int32_t min_tokens = 0;       // in [0, max_new_tokens]; before them no end or stop token is drawn
  // Generation ends at any of these texts, which are not part of the output: up to 64 strings of 1
  // to 1024 bytes of UTF-8. They can also match the text of special tokens.
  std::vector<std::string> stop = {};
  std::vector<int32_t> stop_tokens = {};  // up to 1024; the output omits their text
  bool ignore_eos = false;
  // The text is a JSON value that this JSON schema allows, and ends with it; empty: any text.
  // {"type":"object"}: any object. docs/structured_output.md lists the keywords. Generation
  // may end earlier by max_new_tokens.
  std::string json_schema = {};
  // Natural log-probabilities, by the unmodified logits, of each token and of this many of the most
  // likely tokens; in [0, 20], -1: off.
  int32_t logprobs = -1;
  bool prompt_logprobs = false;  // also for the prompt's tokens; then no cached prefix is reused
};

struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0;
};

enum class FinishReason : uint8_t {
  none,
  stop,       // an end-of-sequence token, a stop token or a stop string
  length,     // max_new_tokens or the context
  cancelled,  // by cancel()
  failed,     // for a reason that concerns this request alone: TokenEvent::error
};

struct TokenEvent {
  int64_t request = 0;
  int32_t token = -1;  // -1: the event brings no token, only the end of the request
  std::string text;    // text that this token made final; always whole UTF-8 characters
  // With SamplingParams::logprobs >= 0: log-probability of the token, and the most likely tokens,
  // best first.
  float logprob = 0;
  std::vector<TokenLogprob> top;
  FinishReason finish = FinishReason::none;
  std::string error;  // with FinishReason::failed: the reason, in one line
  // Set in the event that ends the request.
  int32_t prompt_tokens = 0;
  int32_t cached_tokens = 0;  // prompt tokens served by the prefix cache
  // [prompt_tokens], first 0; with SamplingParams::prompt_logprobs. Empty if there was no token.
  std::vector<float> prompt_logprobs;
  // [prompt_tokens], first empty; with prompt_logprobs and logprobs > 0: the most likely tokens.
  std::vector<std::vector<TokenLogprob>> prompt_top;
};

struct GenerateRequest {
  std::string prompt = {};  // used when tokens is empty
  std::vector<int32_t> tokens = {};
  SamplingParams sampling = {};
  std::string salt = {};  // requests with different salts never share cached prefixes
};

// One message of a user, with an optional system message.
struct ChatPrompt {
  std::string user = {};
  std::optional<std::string> system = {};  // unset: the template's own message, if it has one
};

// A conversation for the checkpoint's chat template, in the JSON of OpenAI's chat completions.
struct Conversation {
  // An array of messages: objects with "role", "content" (a text, or a list of parts of type
  // "text"), and for calls of tools "tool_calls", whose arguments may be objects or JSON texts.
  std::string messages;
  std::string tools = {};              // an array of functions; empty: none
  std::string variables = {};          // an object: further variables of the template; empty: none
  bool add_generation_prompt = true;   // ends with the beginning of an answer
  bool continue_last_message = false;  // ends within the last message, which the model continues
};

struct GenerateResult {
  int64_t request = 0;
  std::vector<int32_t> tokens;  // generated
  std::string text;
  FinishReason finish = FinishReason::none;
  std::string error;  // with FinishReason::failed: the reason; earlier output is kept
  // Empty unless SamplingParams asks for them. logprobs and top have an entry per generated token,
  // prompt_logprobs is [prompt_tokens], first 0.
  std::vector<float> logprobs;
  std::vector<std::vector<TokenLogprob>> top;
  std::vector<float> prompt_logprobs;
  int32_t prompt_tokens = 0;
  int32_t cached_tokens = 0;  // prompt tokens served by the prefix cache
};

// Adds an event to the result of its request, for callers of step(). `logprobs` is true if the
// request's SamplingParams::logprobs is 0 or more; otherwise the event's log-probabilities are
// ignored.
void append_event(GenerateResult& result, const TokenEvent& event, bool logprobs);

// The backends that serve one layer group.
struct GroupSelection {
  std::string layers;  // "layers 0, 2, 4"
  BackendRequest request;
  Selection prefill;
  std::optional<Selection> decode;  // with EngineOptions::decode_backend; unset: same as prefill
  std::optional<Selection> trees;   // with EngineOptions::draft_branches: verifies trees of drafts
  // On a GPU with EngineOptions::cuda_graphs: why decode steps are not captured. Empty: these
  // layers can be captured.
  std::string why_no_graphs;

  // Returns the maximum over the group's backends, which share the workspace.
  size_t workspace_bytes() const;
};

// The choices and allocations that Engine::load would make.
struct EnginePlan {
  std::vector<GroupSelection> selections;               // one per layer group
  EngineMemory memory;                                  // graphs is 0: only a capture shows it
  int32_t max_context = 0, wanted_context = 0;          // see Engine
  std::shared_ptr<const BackendRegistry> own_registry;  // without EngineOptions::registry
  std::string explain() const;                          // describes selections and memory
};

// Not thread-safe: all calls come from one thread.
class Engine {
 public:
  // Loads a checkpoint. Throws Error{invalid_argument}, {corrupt_file}, {io}, {unsupported} or
  // {out_of_memory} naming the option, file, backend or budget. On the CPU, weights stay in mapped
  // files: if a file is truncated later, step() throws Error{io} with its name. For this purpose
  // the first load of a process installs a SIGBUS handler, which passes signals about other memory
  // to the previous handler.
  static std::unique_ptr<Engine> load(const EngineOptions& options);
  // Returns what load() would do, without reading or generating weights. `device`, if given,
  // replaces options.device and need not exist here; kv_memory_bytes must then be given. Throws as
  // load(). The selections are valid as long as options.registry or, without one, the plan.
  static EnginePlan plan(const EngineOptions& options,
                         const std::optional<DeviceInfo>& device = {});
  virtual ~Engine() = default;

  // Queues a request and returns its id; ids count up from 1. Throws Error{invalid_argument} naming
  // the field, its value and the limit, such as a prompt longer than the context.
  virtual int64_t add(const GenerateRequest& request) = 0;
  // Throws as add() does, and queues nothing. Thread-safe, also while step() runs.
  virtual void check(const GenerateRequest& request) const = 0;
  // Ends a request. Its final event carries any text withheld for stop strings. Unknown and
  // finished ids are ignored.
  virtual void cancel(int64_t request) = 0;
  virtual bool idle() const = 0;

  // Waits for one forward pass over the requests that fit and returns an event for every token that
  // it produced, in order, several for a request with accepted drafts; with EngineOptions::overlap
  // the next pass is enqueued before. A single request fails, with an event of
  // FinishReason::failed, if its logits are not numbers, if memory runs out at its token or if the
  // pools cannot hold it; other requests are not affected. Throws if the whole pass fails. Every
  // running request is then preempted, and the next call recomputes it.
  virtual std::vector<TokenEvent> step() = 0;

  // Drops every cached prefix that no running request uses.
  virtual void clear_prefix_cache() = 0;

  // Adds all requests, runs step() until all have finished, and returns their results in the order
  // of the requests; failed requests have results, too. If add() or step() throws, generate()
  // cancels all of `requests` and rethrows; their output is then known to `on_token` only.
  // `on_token` receives every event of these requests and may call add() and cancel(), but not
  // step() or generate(). Before every step, `stop` is called: if it returns true, unfinished
  // requests are cancelled and keep their output so far.
  virtual std::vector<GenerateResult> generate(
      std::span<const GenerateRequest> requests,
      const std::function<void(const TokenEvent&)>& on_token = {},
      const std::function<bool()>& stop = {}) = 0;

  // Returns the logits of every token of one sequence, [tokens, vocabulary] f32. Runs in a pass of
  // its own and reuses no cached prefix.
  virtual std::vector<float> logits(std::span<const int32_t> tokens) = 0;

  // The functions from here to vocabulary() are thread-safe, also while step() runs.
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  // Encodes without the special tokens that encode() adds around a text.
  virtual std::vector<int32_t> encode_bare(std::string_view text) const = 0;
  // Encodes the prompt as the chat template of the checkpoint writes it, up to the beginning of the
  // answer. Special tokens in the prompt's own text are recognised, too. Throws Error{unsupported}
  // for a checkpoint without a usable template, Error{invalid_argument} for messages that the
  // template refuses.
  virtual std::vector<int32_t> encode_chat(const ChatPrompt& prompt) const = 0;
  // Does the same for a whole conversation. Thread-safe. Errors name the field of the conversation.
  virtual std::vector<int32_t> encode_conversation(const Conversation& conversation) const = 0;
  // Returns how the chat template writes calls of tools, for a ToolCallParser.
  virtual ToolCallFormat tool_call_format() const = 0;
  // Special tokens and ids outside the vocabulary have no text.
  virtual std::string decode(std::span<const int32_t> tokens) const = 0;
  // Returns the bytes of one token, which need not be whole characters; of special tokens their
  // text. Ids outside the vocabulary have none.
  virtual std::string token_bytes(int32_t token) const = 0;
  virtual std::span<const int32_t> end_tokens() const = 0;  // end generation; may be empty
  virtual int32_t vocabulary() const = 0;
  virtual int32_t max_context() const = 0;
  // Returns the context that the options or the model ask for; larger than max_context() if the KV
  // budget holds less.
  virtual int32_t wanted_context() const = 0;
  virtual const EngineStats& stats() const = 0;
  // Returns and forgets the records of all passes since the last call, in order. Empty without
  // EngineOptions::record_steps.
  virtual std::vector<StepRecord> take_step_records() { return {}; }
  // Returns choices of load() that a caller may not expect, one sentence each: which of two
  // checkpoints in a folder was read, why the default context is shorter than the model's, why
  // there is no text.
  virtual std::span<const std::string> notes() const = 0;
  // Returns true if the checkpoint's tokenizer was read. Without one, requests must give token ids,
  // results and decode() have no text, and encode(), prompts and stop strings throw with the
  // reason.
  virtual bool has_text() const = 0;
  // Returns one selection per layer group, valid as long as the engine; explain() describes them.
  virtual std::span<const GroupSelection> selections() const = 0;
  virtual std::string explain() const = 0;
};

}  // namespace fovea
